"""The number of concurrent requests follows what a link gives, on simulated links."""

from __future__ import annotations

import threading

import pytest

from stores.net.retries import FIRST_LIMIT, PAUSE_S, Growth, Streams

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
