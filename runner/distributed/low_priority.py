"""Work beside training, which takes what training leaves of the cores."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
_NICENESS = 13  # the scheduler's weight 56, where that of others is 1024
_LEAST_S = 0.2  # below, the work is over before it is noticed


def lower_priority() -> None:
    """Let the calling thread have a twentieth of a core that is busy, and all of one that is not.

    Without privileges, that cannot be undone. SCHED_IDLE would starve it: on two cores with twelve busy threads, a step
    of 4 ms then ends after up to 30 s.
    """
    if sys.platform == "linux":  # elsewhere it would lower that of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


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


def _step(steps: Generator[None, None, T], results: list[T]) -> None:
    try:
        next(steps)
    except StopIteration as end:
        results.append(end.value)
        raise
