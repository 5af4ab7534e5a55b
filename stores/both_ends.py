"""Work on a sequence with two threads, one from each end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["from_both_ends"]

T = TypeVar("T")


def from_both_ends(items: Iterable[T], work: Callable[[T, threading.Event], None]) -> None:
    """Call `work` on every item, with one thread from the front and one from the back; raise the first failure.

    So the threads meet in one file only at the end: two that write one file wait for each other. `work` gets an event
    that is set once another item has failed.
    """
    queue, stop = deque(items), threading.Event()

    def run(take: Callable[[], T]) -> None:
        while not stop.is_set():
            try:
                item = take()
            except IndexError:  # none left
                return
            work(item, stop)

    with ThreadPoolExecutor(2, thread_name_prefix="both-ends") as pool:
        try:
            jobs = [pool.submit(run, take) for take in (queue.popleft, queue.pop)]
            for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                job.result()
        finally:
            stop.set()
