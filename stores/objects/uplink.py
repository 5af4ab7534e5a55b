"""Multipart uploads: as many concurrent parts as the connection can take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NUM_PARTS = 4  # concurrent parts of one upload, by default
MAX_PARTS = 10_000  # of one object, in S3 and Google Cloud Storage
_LEAST_PART_NBYTES = 5 << 20  # that S3 and Google Cloud Storage take, except of the last part
_PART_NBYTES = 8 << 20
_SHORTER_PARTS = 64  # objects of fewer parts than this get shorter ones, of which more are sent at a time
_MIB = 1 << 20
LEAST_BYTES_PER_S = 16 << 10  # of one part: a slower one counts as stalled
LONGEST_PART_S = _PART_NBYTES // LEAST_BYTES_PER_S
_EASY_PART_S = 15.0  # a connection that takes longer for a part, with all parts under way, is slow


def part_nbytes(nbytes: int) -> int:
    usual = min(_PART_NBYTES, max(_LEAST_PART_NBYTES, _whole_mib(nbytes // _SHORTER_PARTS)))
    return max(usual, _whole_mib(-(-nbytes // MAX_PARTS)))


def _whole_mib(nbytes: int) -> int:
    return -(-nbytes // _MIB) * _MIB


class Uplink:
    """A connection to a store: uploads send fewer concurrent parts once an earlier one was slow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._bytes_per_s = float("inf")  # of one upload

    def num_parts(self, part_nbytes: int, most: int = NUM_PARTS) -> int:
        """Return how many concurrent parts an upload should have."""
        easy = self._bytes_per_s * _EASY_PART_S / part_nbytes
        return most if easy >= most else max(1, int(easy))

    def begin(self) -> Sent:
        return Sent(self, self._clock)

    def learn(self, nbytes: int, taken_s: float) -> None:
        """Record the speed of an upload of many parts, from the time that its writes took."""
        if nbytes < NUM_PARTS * _PART_NBYTES:  # dominated by latency
            return
        with self._lock:
            self._bytes_per_s = nbytes / taken_s if taken_s > 0 else float("inf")


class Sent:
    """The bytes of one upload, and the time that sending them took."""

    def __init__(self, uplink: Uplink, clock: Callable[[], float]) -> None:
        self._uplink, self._clock = uplink, clock
        self._nbytes, self._taken_s = 0, 0.0

    @contextmanager
    def sending(self, nbytes: int) -> Iterator[None]:
        begun_s = self._clock()
        yield
        self._nbytes, self._taken_s = self._nbytes + nbytes, self._taken_s + self._clock() - begun_s

    @contextmanager
    def finishing(self) -> Iterator[None]:
        with self.sending(0):
            yield
        self._uplink.learn(self._nbytes, self._taken_s)
