"""Handling of Ctrl-C and SIGTERM from startup on: one line on stderr and exit code 130."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["INTERRUPTED", "STOPPING", "deferred", "end_at_signals", "interrupts", "say_interrupted"]

INTERRUPTED = 130
STOPPING = (signal.SIGINT, signal.SIGTERM)
_SOON_S = 5  # by when a command has usually cleaned up


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Handle the signals that stop a command; those that the parent process ignores stay ignored.

    While modules are imported, a signal exits at once. Once the block calls the function that it receives, a signal
    raises KeyboardInterrupt, so that the command cleans up. That may have to wait for a store that does not answer: a
    second Ctrl-C ends the command as SIGKILL would, which every output survives. A second SIGTERM does not: schedulers
    repeat it, and send SIGKILL anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        end_at_signals()
        yield lambda: _handle(_interrupt)
    finally:
        if signal.getsignal(signal.SIGALRM) is _say_waiting:
            signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_signals(clear_up: Callable[[int], object] = lambda number: None) -> None:
    """Exit at a signal, with a line on stderr; unblocks the signals."""

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(Exception):
            clear_up(number)
        say_interrupted(number)
        os._exit(INTERRUPTED)

    _handle(end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Block signals until the block has ended, or until the program that it executes unblocks them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def say_interrupted(number: int) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"interrupted by {signal.Signals(number).name}\n".encode())


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _say_waiting)
    signal.alarm(_SOON_S)
    raise KeyboardInterrupt


def _say_waiting(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"waiting for what is being written; Ctrl-C again ends this at once\n")
