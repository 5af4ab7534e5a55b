"""Long work on every rank, with regular exchanges so that no rank times out, or at low priority beside training."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch.distributed as dist

from runner.distributed.fail_together import from_all_ranks, raise_on_all_ranks

T = TypeVar("T")
_ROUND_S = 2.0
_NICENESS = 13  # the scheduler's weight 56, where that of others is 1024
_LEAST_S = 0.2  # below, the work is over before it is noticed


def in_rounds(task: str, work: Callable[[threading.Event], T], group: dist.ProcessGroup | None = None) -> T:
    """Run work that may take longer than the timeout between ranks on every rank of a group, and fail together.

    `work` runs in a thread while ranks exchange their progress, and must not run collectives. Once its event is set,
    because another rank has failed, it should end early. When this returns or raises, it has ended on all ranks.

    Raises:
        UserError: as `raise_on_all_ranks`, on all ranks, for the first failure.
    """
    stop = threading.Event()
    failure: Exception | None = None
    with ThreadPoolExecutor(1, thread_name_prefix=task) as pool:
        working = pool.submit(work, stop)
        try:
            is_done = False
            while not is_done:
                wait((working,), timeout=_ROUND_S)
                is_done = is_true_for_all(working.done(), group)
                if failure is None:
                    failure = _failure_of(working, task, group)
                if failure is not None:
                    stop.set()
        finally:
            stop.set()
    if failure is not None:
        raise failure
    return working.result()


def is_true_for_all(value: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `value` is true on all ranks of a group; each of them calls this."""
    return all(from_all_ranks(value, group))


def _failure_of(working: Future[T], task: str, group: dist.ProcessGroup | None) -> Exception | None:
    """Return the failure of any rank so far; on a rank with a bug, that bug."""
    try:
        with raise_on_all_ranks(task, group):
            if working.done():
                working.result()
    except Exception as error:
        return error
    return None


def run_at_low_priority(steps: Generator[None, None, T], most_s: float) -> T:
    """Run a generator to its end in a thread of low priority, and what remains after so many seconds in this one.

    A step should be short: this thread waits for the end of the one that has begun.
    """
    results: list[T] = []
    is_late = threading.Event()

    def run() -> None:
        lower_priority()
        with contextlib.suppress(StopIteration):
            while not is_late.is_set():
                _step(steps, results)

    if most_s >= _LEAST_S:
        with ThreadPoolExecutor(1, thread_name_prefix="background") as pool:
            background = pool.submit(run)
            wait((background,), most_s)
            is_late.set()
        background.result()
    with contextlib.suppress(StopIteration):
        while not results:
            _step(steps, results)
    return results[0]


def lower_priority(niceness: int = _NICENESS) -> None:
    """Let the calling thread have a twentieth of a core that is busy, by default, and all of one that is not.

    Without privileges, that cannot be undone. SCHED_IDLE would starve it: on two cores with twelve busy threads, a step
    of 4 ms then ends after up to 30 s.
    """
    if sys.platform == "linux":  # elsewhere it would lower that of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def _step(steps: Generator[None, None, T], results: list[T]) -> None:
    try:
        next(steps)
    except StopIteration as end:
        results.append(end.value)
        raise
