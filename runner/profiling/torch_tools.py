"""What torch's own tools see of a rank: the operators and kernels of some steps, and what CUDA allocates."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger("runner")
_MOST_EVENTS = 1_000_000  # allocations and frees, the last ones; torch's default has no limit


def profile_folder(log_dir: Path) -> Path:
    return log_dir / "profile"


@contextmanager
def profiled(log_dir: Path, rank: int, step: int, device: torch.device) -> Iterator[None]:
    """Write the operators and kernels of a step, counted from 1, as a Chrome trace: a file for each rank and step."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints that it begins and ends
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as kernels:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    path = profile_folder(log_dir) / f"rank-{rank:05d}-step-{step:06d}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kernels.export_chrome_trace(str(path))
    except OSError as error:  # it must not end a run
        logger.warning("note: %s cannot be written: %s", path, error.strerror)


@contextmanager
def memory_snapshot(log_dir: Path, rank: int, device: torch.device) -> Iterator[None]:
    """Record what CUDA allocates, and write it at the end, also of a rank that fails, for pytorch.org/memory_viz."""
    if device.type != "cuda":
        if rank == 0:
            logger.warning("note: --memory-snapshot has no effect on the CPU")
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)  # documented, for all its underscore
    path = profile_folder(log_dir) / f"memory-{rank:05d}.pickle"
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:  # after an error of CUDA, which is what the rank reports
            logger.warning("note: %s cannot be written: %s", path, getattr(error, "strerror", error))
