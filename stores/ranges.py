"""Byte ranges fetched over a network in few, large, concurrent requests, with read-ahead.

Memory: `NUM_PARALLEL` requests of at most `REQUEST_NBYTES` per open reader, 64 MiB.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from stores.base import Range, merge_ranges

GAP_NBYTES = 1 << 20  # gaps up to this size are fetched too, which is faster than another request
REQUEST_NBYTES = 16 << 20
NUM_PARALLEL = 4


class Fetch(Protocol):
    def __call__(self, into: memoryview, position: int, stop: threading.Event) -> None:
        """Fill `into` with the bytes at `position`. Called from several threads concurrently.

        Once `stop` is set, the bytes are no longer needed: raise any exception soon.

        Raises:
            InputError: they cannot be read.
        """
        ...


def plan_requests(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the requests that fetch these ranges, ascending: small gaps bridged, long runs split equally."""
    runs: list[Range] = []
    for begin, end in merge_ranges(ranges):
        if begin == end:
            continue
        if runs and begin - runs[-1][1] <= GAP_NBYTES:
            begin = runs.pop()[0]
        runs.append((begin, end))
    return tuple(piece for run in runs for piece in cut(*run))


class RangeReader:
    """Reads a file's ranges with read-ahead. Reading backwards or outside the ranges takes a request each time."""

    def __init__(self, fetch: Fetch, ranges: Iterable[Range]) -> None:
        self._fetch = fetch
        self._planned = deque(plan_requests(ranges))
        self._longest = max((end - begin for begin, end in self._planned), default=0)
        self._running: deque[_Request] = deque()  # ascending, before all that are planned
        self._spare: list[memoryview] = []
        self._stop = threading.Event()
        self._pool: ThreadPoolExecutor | None = None

    def read_into(self, part: memoryview, position: int) -> None:
        while part:
            request = self._request_at(position, len(part))
            if request is None:
                self._fetch(part, position, self._stop)
                return
            first = position - request.begin
            count = min(len(part), request.end - position)
            part[:count] = request.data.result()[first : first + count]
            part, position = part[count:], position + count
            if position == request.end:
                self._leave_behind(position)
                self._fetch_ahead()

    def close(self) -> None:
        """Cancel running requests; may be called twice."""
        self._stop.set()
        self._planned.clear()
        self._running.clear()
        self._spare.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _request_at(self, position: int, nbytes: int) -> _Request | None:
        """Return the request that contains `position`; None if the caller must fetch it directly."""
        self._leave_behind(position)
        if not self._running and len(self._planned) == 1:
            begin, end = self._planned[0]
            if position <= begin and end <= position + nbytes:  # nothing to read ahead: no thread, no copy
                self._planned.clear()
                return None
        self._fetch_ahead()
        if self._running and self._running[0].begin <= position:
            return self._running[0]
        return None

    def _leave_behind(self, position: int) -> None:
        """Drop the requests that end before `position`, and reuse their memory."""
        while self._running and self._running[0].end <= position:
            data = self._running.popleft().data
            if data.cancel():
                continue
            wait((data,))  # a skipped one: never use memory for more than NUM_PARALLEL
            if data.exception() is None:
                self._spare.append(data.result())
        while self._planned and not self._running and self._planned[0][1] <= position:
            self._planned.popleft()

    def _fetch_ahead(self) -> None:
        if self._planned and self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_PARALLEL, thread_name_prefix="fetch")
        while self._pool and self._planned and len(self._running) < NUM_PARALLEL:
            begin, end = self._planned.popleft()
            self._running.append(_Request(begin, end, self._pool.submit(self._run, begin, end)))

    def _run(self, begin: int, end: int) -> memoryview:
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = memoryview(bytearray(self._longest))
        self._fetch(memory[: end - begin], begin, self._stop)
        return memory


@dataclass(frozen=True, slots=True)
class _Request:
    begin: int
    end: int
    data: Future[memoryview]


def cut(begin: int, end: int, most_nbytes: int = REQUEST_NBYTES) -> Iterable[Range]:
    """Split a range into equal pieces of limited length."""
    num_pieces = -(-(end - begin) // most_nbytes)
    cuts = [begin + (end - begin) * piece // num_pieces for piece in range(num_pieces + 1)]
    return pairwise(cuts)
