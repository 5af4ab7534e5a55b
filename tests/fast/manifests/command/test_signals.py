"""Signals that are deferred: whatever ends the block, the process takes them as before."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from manifests.command.signals import STOPPING, deferred


def blocked() -> set[signal.Signals]:
    return set(STOPPING).intersection(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


@pytest.fixture(autouse=True)
def _unblocked() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def test_signals_stay_deferred_until_the_outer_block_ends() -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    with deferred():
        with deferred():
            pass
        assert blocked() == set(STOPPING)
    assert blocked() == set()
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_signal_that_interrupts_as_the_block_begins_leaves_none_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread, of which signals are not blocked, receives it, and the handler of before raises here."""
    install: Callable[..., object] = signal.signal

    def interrupted(number: int, handler: object) -> object:
        monkeypatch.setattr(signal, "signal", install)
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt), deferred():
        pass
    assert blocked() == set()
