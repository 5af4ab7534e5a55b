"""How many threads and requests copy at a time."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from stores.prefetch import MEMORY_NBYTES, Prefetcher

__all__ = ["Parallelism", "Used", "usable_cores"]

_MAX_THREADS = 32  # beyond, the interpreter's lock is the limit
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(slots=True)
class Used:
    """The most that a command used: threads that copied, and concurrent requests."""

    num_threads: int = 0
    num_streams: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """How many threads copy, how many requests to remote stores run at a time, and the memory that those take.

    Without numbers, there are as many threads as cores, and as many requests as are found to help.
    """

    num_threads: int | None = None
    num_streams: int | None = None
    memory_nbytes: int = MEMORY_NBYTES
    used: Used = field(default_factory=Used, compare=False)

    def threads_for(self, num_items: int) -> int:
        """Return how many threads to start for so many pieces of work."""
        number = min(self.num_threads or max(2, min(usable_cores(), _MAX_THREADS)), max(1, num_items))
        self.used.num_threads = max(self.used.num_threads, number)
        return number

    def prefetcher(self, num_lanes: int, stop: threading.Event) -> Prefetcher:
        """Return a prefetcher for so many threads."""
        return Prefetcher(num_lanes, stop, num_streams=self.num_streams, memory_nbytes=self.memory_nbytes)

    def add(self, prefetcher: Prefetcher) -> None:
        """Record what a prefetcher used."""
        self.used.num_streams = max(self.used.num_streams, prefetcher.most_running)


def usable_cores(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of cores that this process may use: by its affinity, and by the quotas of its cgroups."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return int(cores)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy
            folder = cgroups
        elif "cpu" in controllers.split(","):
            folder = cgroups / controllers
        else:
            continue
        below = Path(path.lstrip("/"))
        cores = min(cores, *(_quota(folder / each) for each in (below, *below.parents)))
    return max(1, int(cores))


def _quota(cgroup: Path) -> float:
    """Return the cores that a cgroup allows; without a limit, infinity."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if quota not in ("max", "-1") else float("inf")
    except (OSError, ValueError):
        return float("inf")
