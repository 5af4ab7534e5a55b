"""glibc's heap, which keeps freed activations and gradients in holes between what is in use.

See Note [Holes] in manifests/models/memory.py. By default four ranks that shard 1 GB of weights use up to 1.75 times
the memory without holes, and two pipeline ranks 1.24 times. Blocks above a threshold are not in the heap: they return
to the system when they are freed, and each new one costs page faults. With one of 256 KiB, peaks are within 2 % of the
plan, but five steps of a Llama of width 512 and their start take 59 s of processor time instead of 43. So only ranks
that shard tensors, whose blocks are smaller, have it; others have one of 1 MiB, and return holes after each action:
52 s, and within 10 % of the plan.

# Note [Host memory]
`compact` does that. `fast` leaves malloc as it is. `auto` is fast where the plan of `fast`, and a tenth by which peaks
may exceed it, fit into the rank's share of what the node has free.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from manifests.command.sizes import show_bytes
from manifests.models.memory import Memory
from manifests.models.training import HostMemory

_MARGIN = 1.1
_M_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h
_LARGE_NBYTES, _LARGE_SHARD_NBYTES = 1 << 20, 256 << 10
_LIBC = ctypes.CDLL(None)
_IS_GLIBC = hasattr(_LIBC, "malloc_trim")


@dataclass(kw_only=True, slots=True)
class _Heap:
    """The state of this process's malloc."""

    is_compact: bool = False


_HEAP = _Heap()


def set_up_heap(
    option: HostMemory | Literal["auto"], memory: Memory, num_ranks: int, *, is_sharded: bool, is_gathered: bool
) -> tuple[int, str]:
    """Set up this process's malloc for one of the ranks on this node; `memory` is the plan of a compact one.
    Parameters that are sharded, also by tensor parallelism, may be gathered by FSDP.

    Returns the bytes that are planned for it, and a line for the log.
    """
    available, fast_nbytes = available_nbytes(num_ranks), memory.with_holes(is_gathered=is_gathered).total
    policy = choose_host_memory(option, fast_nbytes, available)
    if policy == "compact":
        compact_heap(is_sharded=is_sharded)
    planned_nbytes = fast_nbytes if policy == "fast" else memory.total
    free = "" if available is None else f", {show_bytes(available)} available to each rank of this node"
    return planned_nbytes, f"host memory: {policy}, {show_bytes(planned_nbytes)} planned{free}"


def choose_host_memory(
    option: HostMemory | Literal["auto"], fast_nbytes: int, available_nbytes: int | None
) -> HostMemory:
    """Return the policy, from what `fast` is planned to use; see Note [Host memory]. None: it is not known."""
    if option != "auto":
        return option
    return "fast" if available_nbytes is not None and _MARGIN * fast_nbytes <= available_nbytes else "compact"


def available_nbytes(num_ranks: int, root: Path = Path("/")) -> int | None:
    """Return what each of the ranks on this node may still use: of the node, and of its control groups.

    The page cache counts as free. None where the system does not tell.
    """
    limits = []
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    groups = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        names = ("memory.max", "memory.current", "")
        folder = groups
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            folder = groups / "memory"
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):  # in a container, its own group is the root
            limits += _unused(folder.joinpath(*parts[:depth]), *names)
    return max(0, min(limits)) // num_ranks if limits else None


def compact_heap(*, is_sharded: bool) -> None:
    """Make malloc return large blocks to the system as soon as they are freed, and `return_holes` the rest."""
    _HEAP.is_compact = _IS_GLIBC
    if _IS_GLIBC:
        _LIBC.mallopt(_M_MMAP_THRESHOLD, _LARGE_SHARD_NBYTES if is_sharded else _LARGE_NBYTES)


def return_holes(device_type: str) -> None:
    """Return free pages within a compact heap to the system, if the tensors are in host memory."""
    if _HEAP.is_compact and device_type == "cpu":
        _LIBC.malloc_trim(0)


def _unused(group: Path, limit: str, usage: str, prefix: str) -> list[int]:
    """Return what a control group may still use, if it has a limit; `prefix` is that of its counts with subgroups."""
    try:
        most, used = int((group / limit).read_text()), int((group / usage).read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return []
    counts = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
    cached = (int(counts.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
    return [most - used + sum(cached)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
