"""Handling of Ctrl-C and SIGTERM from startup on: one line on stderr and exit code 130.

# Note [A second Ctrl-C]
What is interrupted cleans up, which may have to wait for a store that does not answer, as may the main thread, whose
request returns before Python runs a handler. So a thread watches, too: after a few seconds it says what to do, and a
second Ctrl-C ends the process as SIGKILL would, which every output survives. A second SIGTERM does not: schedulers
repeat it, and send SIGKILL anyway.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

INTERRUPTED = 130
STOPPING = (signal.SIGINT, signal.SIGTERM)
_SOON_S = 5  # by when a command has usually cleaned up
_SAME_S = 1  # for so long after a signal, another one is the same: programs that start others send it on to them


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """Handle the signals that stop a command; those that the parent process ignores stay ignored.

    While modules are imported, a signal exits at once. Once the block calls the function that it receives, a signal
    raises KeyboardInterrupt, so that the command cleans up. See Note [A second Ctrl-C].
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    with contextlib.ExitStack() as stack:
        try:
            end_at_signals()
            yield lambda: stack.enter_context(_interrupted_at_signals())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _interrupted_at_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first signal until the block ends, and end the process at a second Ctrl-C."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True)
    watcher.start()
    _handle(_interrupt)
    try:
        yield
    finally:
        if (others := signal.set_wakeup_fd(before)) not in (writer, -1):
            signal.set_wakeup_fd(others)
        os.close(writer)
        watcher.join()
        os.close(reader)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _handle(_again)
    raise KeyboardInterrupt


def _again(number: int, frame: FrameType | None) -> None:
    """Leave it to the watcher."""


def _watch(reader: int) -> None:
    """Say what the first signal waits for, and end the process at a second Ctrl-C."""
    since_s, is_said = float("inf"), False
    while True:
        is_waiting = since_s < float("inf") and not is_said
        if not select.select([reader], [], [], _SOON_S if is_waiting else None)[0]:
            with contextlib.suppress(OSError):
                os.write(2, b"waiting for what is being read or written; Ctrl-C again ends this at once\n")
            is_said = True
            continue
        if not (arrived := os.read(reader, 64)):
            return
        for number in arrived:
            if number not in STOPPING or signal.getsignal(number) not in (_interrupt, _again):
                continue  # someone else's now
            if number == signal.SIGINT and time.monotonic() > since_s + _SAME_S:
                say_interrupted(number)
                os._exit(INTERRUPTED)
            since_s = min(since_s, time.monotonic())


def end_at_signals(
    clear_up: Callable[[int], object] = lambda number: None,
    numbers: Sequence[signal.Signals] = STOPPING,
    *,
    in_thread: bool = False,
) -> None:
    """Exit at a signal, with a line on stderr; unblocks the signals.

    With `in_thread`, a thread does so, too: Python runs no handler while the main thread waits in C++, as in a
    rendezvous. It does nothing about signals that have got another handler since.
    """
    ending = threading.RLock()

    def end(number: int, frame: FrameType | None) -> None:
        if not ending.acquire(timeout=_SOON_S):  # the other thread ends the process
            return
        with contextlib.suppress(Exception):
            clear_up(number)
        say_interrupted(number)
        os._exit(INTERRUPTED)

    def watch(reader: int) -> None:
        while arrived := os.read(reader, 64):
            for number in arrived:
                if signal.getsignal(number) is end:
                    end(number, None)

    _handle(end, numbers)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    if in_thread:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=watch, args=(reader,), name="signals", daemon=True).start()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Block signals until the block has ended, or until the program that it executes unblocks them.

    What another thread receives, of which signals are not blocked, is left pending for this one.
    """
    if threading.current_thread() is not threading.main_thread():  # which signals do not interrupt
        yield
        return
    thread, mask = threading.get_ident(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    before = {number: signal.getsignal(number) for number in STOPPING}

    def leave_pending(number: int, frame: FrameType | None) -> None:
        signal.pthread_kill(thread, number)

    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        _handle(leave_pending)
        yield
    finally:
        try:
            for number, handler in before.items():
                if signal.getsignal(number) is leave_pending:
                    signal.signal(number, handler)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def say_interrupted(number: int) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"interrupted by {signal.Signals(number).name}\n".encode())


def _handle(handler: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals] = STOPPING) -> None:
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
