"""Patience with servers: how long, how often, with how many streams, and for what pace."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from stores.net.retries import (
    FIRST_LIMIT,
    LEAST_BYTES_PER_S,
    PAUSE_S,
    Growth,
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


# The number of concurrent requests follows what a link gives, on simulated links.


_REQUEST_NBYTES = 8 << 20
_STEP_S = 0.01
_MOST = 256  # requests that wait or run


class Link:
    """Connections of a limited speed that share a line; each request is answered after `latency_s`."""

    def __init__(self, *, latency_s: float, connection: float, line: float) -> None:
        self.latency_s, self.connection, self.line = latency_s, connection, line
        self.now_s, self.taken = 0.0, list[float]()
        self.begun: list[tuple[float, float]] = []  # of each request: when it was sent, and its bytes so far

    def run(self, growth: Growth, seconds: float) -> None:
        for _ in range(round(seconds / _STEP_S)):
            self.now_s += _STEP_S
            self.begun += [(self.now_s, 0.0)] * (int(min(growth.limit, _MOST)) - len(self.begun))
            answered = sum(self.now_s - sent_s >= self.latency_s for sent_s, _ in self.begun)
            each = min(self.connection, self.line / max(answered, 1)) * _STEP_S
            left = []
            for sent_s, nbytes in self.begun:
                if self.now_s - sent_s < self.latency_s:
                    left.append((sent_s, nbytes))
                    continue
                answer_s = self.now_s - sent_s if nbytes == 0.0 else 0.0
                growth.arrived(self.now_s, round(each), answer_s, is_wanted=growth.limit < _MOST)
                if nbytes + each < _REQUEST_NBYTES:
                    left.append((sent_s, nbytes + each))
            self.begun = left
            self.taken.append(answered * each)

    def speed(self, seconds: float) -> float:
        return sum(self.taken[-round(seconds / _STEP_S) :]) / seconds


@pytest.mark.parametrize(
    ("latency_s", "connection", "line", "limits"),
    [
        pytest.param(0.04, 8e6, 512e6, (64, 256), id="slow connections"),
        pytest.param(0.05, 90e6, 12.5e9, (256,), id="bucket at 100 Gb/s"),
        pytest.param(0.04, 8e6, 120e6, (16,), id="line filled by few"),
        pytest.param(0.005, 1e9, 1e9, (16,), id="line filled by one"),
        pytest.param(0.2, 1e6, 4e6, (16,), id="slow line"),
    ],
)
def test_limit_is_raised_while_the_link_gives_more(
    latency_s: float, connection: float, line: float, limits: tuple[int, ...]
) -> None:
    growth, link = Growth(FIRST_LIMIT), Link(latency_s=latency_s, connection=connection, line=line)
    link.run(growth, 6.0)
    assert growth.limit in limits
    assert link.speed(2.0) > 0.7 * line


def test_limit_that_did_not_help_is_tried_again_after_a_pause() -> None:
    growth, link = Growth(FIRST_LIMIT), Link(latency_s=0.04, connection=8e6, line=100e6)
    link.run(growth, 6.0)
    assert growth.limit == FIRST_LIMIT
    link.line = 1e12
    link.run(growth, PAUSE_S)
    assert growth.limit > FIRST_LIMIT


def test_fixed_limit_does_not_grow_and_is_halved_by_busy_responses() -> None:
    now_s = [0.0]
    streams, never = Streams(lambda: now_s[0]), threading.Event()
    streams.fix(2)
    waiting = threading.Thread(target=lambda: streams.slot(never).__enter__())
    with streams.slot(never) as stream, streams.slot(never):
        waiting.start()
        for _ in range(100):
            now_s[0] += 1.0
            stream.take(1 << 20)
        assert streams.limit == 2
    waiting.join(10)
