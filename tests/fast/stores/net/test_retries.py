"""Patience with servers: how long, how often, with how many streams, and for what pace."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from stores.net.retries import (
    LEAST_BYTES_PER_S,
    Pace,
    PassingError,
    Retries,
    Streams,
    answered_within,
    keep_trying,
)

NEVER = threading.Event()


class Clock:
    """A clock that others move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def failing(clock: Clock, step_s: float, moments: list[float]) -> None:
    moments.append(clock.now)
    clock.now += step_s
    raise PassingError("busy", code="store.busy")


def test_patience_begins_again_with_progress() -> None:
    clock, moments, done = Clock(), list[float](), [0]

    def advance() -> None:
        done[0] += 1 << 20
        if len(moments) == 50:
            return
        failing(clock, 100.0, moments)

    keep_trying(advance, "here", Retries(first_wait_s=0.0), NEVER, clock, lambda: done[0])
    assert moments[-1] > 10 * Retries().patience_s


def test_busy_server_gets_half_as_many_streams_and_more_again_when_it_keeps_up() -> None:
    streams, entered = Streams(), []
    three = (streams.slot(NEVER), streams.slot(NEVER), streams.slot(NEVER))
    with three[0], three[1], three[2], pytest.raises(PassingError), streams.slot(NEVER):
        raise PassingError("busy", code="store.busy")
    assert 2 <= streams.limit <= 4
    for _ in range(3):
        with pytest.raises(PassingError), streams.slot(NEVER):
            raise PassingError("busy", code="store.busy")
    assert streams.limit == 1
    with streams.slot(NEVER):
        other = threading.Thread(target=lambda: entered.append(streams.slot(NEVER).__enter__()))
        other.start()
        other.join(0.05)
        assert entered == []
    other.join(10)
    assert len(entered) == 1
    assert streams.limit == 2


def test_stream_that_nobody_wants_any_more_does_not_wait() -> None:
    streams, stop = Streams(), threading.Event()
    with pytest.raises(PassingError), streams.slot(NEVER):
        raise PassingError("busy", code="store.busy")
    stop.set()
    with streams.slot(NEVER), pytest.raises(CancelledError), streams.slot(stop):
        pass


def test_pace_is_judged_over_whole_windows() -> None:
    clock = Clock()
    pace = Pace("server", 30.0, clock)
    clock.now = 29.0
    pace.take(0)
    clock.now = 30.0
    pace.take(30 * LEAST_BYTES_PER_S)
    clock.now = 59.0
    pace.take(1)
    clock.now = 61.0
    with pytest.raises(PassingError) as refused:
        pace.take(1)
    assert refused.value.code == "store.too-slow"


def test_answer_that_comes_too_late_is_abandoned() -> None:
    late, abandoned = threading.Event(), threading.Event()
    with pytest.raises(PassingError) as refused:
        answered_within(0.01, "server", lambda: late.wait(10), abandoned.set)
    assert refused.value.code == "store.too-slow"
    late.set()
    assert abandoned.wait(10)
    assert answered_within(10.0, "server", lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        answered_within(10.0, "server", lambda: 1 // 0)
