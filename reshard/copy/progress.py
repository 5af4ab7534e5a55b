"""Progress of an operation, as callers of the API see it: bytes done, and bytes in total."""

from __future__ import annotations

import threading
from typing import Protocol

from reshard.copy.runs import ByteCounter


class Progress(Protocol):
    """A callback for an operation's progress; it may raise to stop the operation."""

    def __call__(self, done_nbytes: int, total_nbytes: int, /) -> object:
        """Receive the bytes that are done, and an estimate of the total.

        It is called from worker threads, one call at a time, and `done_nbytes` never decreases. Since the total is an
        estimate, `done_nbytes` may end below or above it.
        """
        ...


def counting(progress: Progress | None, total_nbytes: int) -> ByteCounter:
    """Return a callback that takes the bytes of each step and reports their sum to `progress`."""
    if progress is None:
        return lambda nbytes: None
    lock, done_nbytes = threading.Lock(), 0

    def count(nbytes: int) -> None:
        nonlocal done_nbytes
        with lock:
            done_nbytes += nbytes
            progress(done_nbytes, total_nbytes)

    progress(0, total_nbytes)
    return count
