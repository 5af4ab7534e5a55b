"""How many threads this process should start: by the cores that it may use."""

from __future__ import annotations

import os
from pathlib import Path

_MAX_THREADS = 32  # beyond, the interpreter's lock is the limit
_CGROUPS = Path("/sys/fs/cgroup")


def threads_for_ranks(num_ranks: int = 1) -> int:
    """Return how many threads each of so many processes should start to read or write files: at least two."""
    return max(2, min(usable_cores() // num_ranks, _MAX_THREADS))


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
