"""Byte ranges of remote files, requested ahead in the order in which threads will read them.

`Prefetcher` has the requests of a command's threads; a `RangeReader` those of one reader: at most four at a time, of up
to 16 MiB each.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Protocol, Self, runtime_checkable

from stores.base import InputFile, Range, Reader, merge_ranges
from stores.net.retries import Streams

STREAM_NBYTES = 10 << 20  # a request, and those that wait to be read
MEMORY_NBYTES = 64 * STREAM_NBYTES
REQUEST_NBYTES = 4 << 20
_LEAST_REQUEST_NBYTES = 1 << 20
_LAST_REQUEST_NBYTES = 2 << 20
_MOST_SPARE = 16  # requests' memory that waits to be used again
_GAP_NBYTES = 64 << 10  # read too, in place of another request
_LEAST_OPENED_NBYTES = 64 << 10  # a request of a file that is opened by itself

# Of a reader by itself, which has few requests, and bridges longer gaps.
GAP_NBYTES = 1 << 20
LONGEST_REQUEST_NBYTES = 16 << 20
NUM_PARALLEL = 4

Planned = tuple[InputFile, int, int]  # a file, and begin and end of a range in it


class Fetch(Protocol):
    def __call__(self, into: memoryview, position: int, stop: threading.Event) -> None:
        """Fill `into` with the bytes at `position`. Called from several threads concurrently.

        Once `stop` is set, the bytes are no longer needed: raise any exception soon.
        """


@runtime_checkable
class LendingFetch(Fetch, Protocol):
    """One whose client has memory of its own, which saves a copy."""

    def lend(self, position: int, nbytes: int, stop: threading.Event) -> memoryview | None:
        """Return the bytes at `position`; None where a call should fetch them, as with a slow server. Raises as it."""


@runtime_checkable
class RemoteFile(Protocol):
    """A file whose ranges are fetched in concurrent requests, each as one of its server's streams."""

    @property
    def streams(self) -> Streams: ...

    def fetching(self) -> Fetch | None:
        """Return the function that fetches its bytes; None if they are on this machine."""


class Prefetcher:
    """The requests of several threads, each with a `lane` of its own and its share of the memory.

    `num_streams` fixes the number of concurrent requests; otherwise that is found by trying, as far as the memory goes.
    Whoever sets `stop` cancels them. If it `reuses` memory, what was read of a response is overwritten by a later one;
    new memory is slow, since the system clears it page by page.
    """

    def __init__(
        self,
        num_lanes: int,
        stop: threading.Event,
        *,
        num_streams: int | None = None,
        memory_nbytes: int = MEMORY_NBYTES,
        stream_nbytes: int = STREAM_NBYTES,
        request_nbytes: int = REQUEST_NBYTES,
        reuses: bool = True,
    ) -> None:
        self._reuses, self._spare = reuses, list[memoryview]()
        self._fixed = num_streams
        self.num_streams = num_streams or max(1, memory_nbytes // stream_nbytes)
        self.share_nbytes = memory_nbytes // num_lanes
        self._streams_of_lane = max(1, self.num_streams // num_lanes)
        self._request_nbytes = max(_LEAST_REQUEST_NBYTES, min(request_nbytes, memory_nbytes // self.num_streams))
        self.stop = stop
        self._fetches: dict[InputFile, Fetch | None] = {}
        self.most_running = 0
        self._running, self._lock = 0, threading.Lock()
        self._pool = ThreadPoolExecutor(self.num_streams, thread_name_prefix="fetch")

    def fetch_of(self, file: InputFile) -> Fetch | None:
        """Return the function that fetches a file's bytes; None if they are on this machine."""
        if file not in self._fetches:
            self._fetches[file] = file.fetching() if isinstance(file, RemoteFile) else None
            if isinstance(file, RemoteFile) and self._fixed is not None:
                file.streams.fix(self._fixed)
        return self._fetches[file]

    def open(self, file: InputFile, begin: int, end: int, most_nbytes: int) -> Reader:
        """Open a file to read a range of it in order; the requests of a remote one take `most_nbytes`, or one does."""
        fetch = self.fetch_of(file)
        if fetch is None:
            return file.open(((begin, end),))
        lane = Lane(self, share_nbytes=most_nbytes)
        reader = PlannedReader(lane, fetch)
        if begin < end:
            request_nbytes = min(self._request_nbytes, max(most_nbytes // 2, _LEAST_OPENED_NBYTES))
            lane.add(reader, cut(begin, end, request_nbytes))
        lane.fill()
        return reader

    def request_nbytes(self, left_nbytes: int) -> int:
        """Return how long a lane's requests are: the last ones are short, so that all streams end at about one time."""
        return min(self._request_nbytes, max(_LAST_REQUEST_NBYTES, left_nbytes // self._streams_of_lane))

    def begin(self, fetch: Fetch, begin: int, end: int) -> Future[memoryview]:
        return self._pool.submit(self._run, fetch, begin, end)

    def close(self) -> None:
        self.stop.set()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, fetch: Fetch, begin: int, end: int) -> memoryview:
        with self._lock:
            self._running += 1
            self.most_running = max(self.most_running, self._running)
        try:
            # A longer response would take twice its memory for a moment.
            lending = fetch if isinstance(fetch, LendingFetch) and end - begin <= REQUEST_NBYTES else None
            if lending is not None and (lent := lending.lend(begin, end - begin, self.stop)) is not None:
                return lent
            memory = self._memory_of(end - begin)
            fetch(memory, begin, self.stop)
            return memory
        finally:
            with self._lock:
                self._running -= 1

    def reuse(self, memory: memoryview) -> None:
        """Take memory back that nobody reads any more."""
        if self._reuses and isinstance(memory.obj, mmap.mmap) and len(self._spare) < _MOST_SPARE:
            self._spare.append(memoryview(memory.obj))

    def _memory_of(self, nbytes: int) -> memoryview:
        """Return memory that the system gets back at once when it is freed; malloc would keep it for this thread."""
        if nbytes < _LEAST_REQUEST_NBYTES:
            return memoryview(bytearray(nbytes))
        try:
            memory = self._spare.pop()
        except IndexError:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = memoryview(mmap.mmap(-1, self._request_nbytes, flags=flags))
        return memory[:nbytes]


class Lane:
    """The requests of one thread, for several pieces of work that it will do in this order, of about `nbytes` in all.

    `more` is called when there is memory for more than is planned; it may plan more, and returns whether it did.
    `most_requests` limits how many are not yet read to the end, `share_nbytes` their memory.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        more: Callable[[], bool] = lambda: False,
        nbytes: int = sys.maxsize,
        most_requests: int = sys.maxsize,
        share_nbytes: int | None = None,
    ) -> None:
        self._prefetcher, self._more, self._left_nbytes = prefetcher, more, nbytes
        self._share_nbytes = prefetcher.share_nbytes if share_nbytes is None else share_nbytes
        self._planned = deque[_Request]()
        self._most_requests = most_requests
        self._nbytes, self._num_requests = 0, 0  # requested and not yet read to the end

    def plan(self, ranges: Iterable[Planned]) -> dict[InputFile, PlannedReader]:
        """Plan ranges in the order in which they will be read; return a reader of each remote file among them."""
        fetch_of, readers = self._prefetcher.fetch_of, dict[InputFile, PlannedReader]()
        for file, begin, end in join_ranges(item for item in ranges if fetch_of(item[0]) is not None):
            if file not in readers:
                fetch = fetch_of(file)
                assert fetch is not None
                readers[file] = PlannedReader(self, fetch)
            self.add(readers[file], cut(begin, end, self._prefetcher.request_nbytes(self._left_nbytes)))
            self._left_nbytes -= end - begin
        return readers

    def add(self, reader: PlannedReader, ranges: Iterable[Range]) -> None:
        """Plan a request of a reader for each of these ranges."""
        requests = [_Request(reader.fetch, begin, end) for begin, end in ranges]
        reader.requests += requests
        self._planned += requests

    def fill(self) -> None:
        """Begin requests, and plan more, as far as the thread's share of the memory goes."""
        self._begin_planned()
        while not self._planned and self._nbytes < self._share_nbytes and self._more():
            self._begin_planned()

    def fetch(self, fetch: Fetch, part: memoryview, position: int) -> None:
        """Read what was not planned."""
        fetch(part, position, self._prefetcher.stop)

    def result(self, request: _Request) -> memoryview:
        while request.data is None:  # for lack of memory, which this thread alone can free
            self._begin(self._planned.popleft())
        return request.data.result()

    def release(self, request: _Request) -> None:
        """Free a request's memory for others."""
        if request.data is None:
            self._planned.remove(request)
            return
        if not request.data.cancel() and request.data.done() and request.data.exception() is None:
            self._prefetcher.reuse(request.data.result())
        request.data = None
        self._nbytes -= request.end - request.begin
        self._num_requests -= 1

    def _begin_planned(self) -> None:
        while self._planned and self._num_requests < self._most_requests:
            if self._nbytes + self._planned[0].end - self._planned[0].begin > self._share_nbytes:
                return
            self._begin(self._planned.popleft())

    def _begin(self, request: _Request) -> None:
        self._nbytes += request.end - request.begin
        self._num_requests += 1
        request.data = self._prefetcher.begin(request.fetch, request.begin, request.end)


class _Request:
    """A range, and its bytes once it is requested."""

    def __init__(self, fetch: Fetch, begin: int, end: int) -> None:
        self.fetch, self.begin, self.end = fetch, begin, end
        self.data: Future[memoryview] | None = None


class PlannedReader:
    """Reads planned ranges of one file, in their order, and frees their memory."""

    def __init__(self, lane: Lane, fetch: Fetch, requests: Iterable[_Request] = (), *, keeps: bool = False) -> None:
        self._lane, self.fetch, self._keeps = lane, fetch, keeps
        self.requests = deque(requests)

    def keeping(self) -> PlannedReader:
        """Return a reader that leaves the bytes in memory, where this one finds them."""
        return PlannedReader(self._lane, self.fetch, self.requests, keeps=True)

    def read_into(self, part: memoryview, position: int) -> None:
        while part:
            while self.requests and self.requests[0].end <= position:
                self._leave()
            request = self.requests[0] if self.requests else None
            if request is None or not request.begin <= position < request.end:
                self._lane.fetch(self.fetch, part, position)
                return
            first, count = position - request.begin, min(len(part), request.end - position)
            part[:count] = self._lane.result(request)[first : first + count]
            part, position = part[count:], position + count
            if position == request.end:
                self._leave()
                self._lane.fill()

    def lend(self, position: int, nbytes: int) -> memoryview | None:
        """Return at most so many bytes where they are in memory, until the next call; None if they are not planned."""
        while self.requests and self.requests[0].end <= position:
            self._leave()
            self._lane.fill()
        request = self.requests[0] if self.requests else None
        if request is None or position < request.begin:
            return None
        first = position - request.begin
        return self._lane.result(request)[first : first + nbytes].toreadonly()

    def close(self) -> None:
        while self.requests:
            self._leave()

    def _leave(self) -> None:
        request = self.requests.popleft()
        if not self._keeps:
            self._lane.release(request)


class RangeReader(PlannedReader):
    """Reads ranges of a file ahead, in requests of its own. Reading backwards, or outside of them, takes one more."""

    def __init__(self, fetch: Fetch, ranges: Iterable[Range]) -> None:
        self._prefetcher = Prefetcher(
            1,
            threading.Event(),
            num_streams=NUM_PARALLEL,
            memory_nbytes=NUM_PARALLEL * LONGEST_REQUEST_NBYTES,
            request_nbytes=LONGEST_REQUEST_NBYTES,
        )
        super().__init__(Lane(self._prefetcher, most_requests=NUM_PARALLEL), fetch)
        self._lane.add(self, plan_requests(ranges))

    def read_into(self, part: memoryview, position: int) -> None:
        while self.requests and self.requests[0].end <= position:  # skipped
            self._leave()
        if len(self.requests) == 1 and self.requests[0].data is None:
            request = self.requests[0]
            if position <= request.begin and request.end <= position + len(part):  # no thread, no copy
                self._leave()
        self._lane.fill()
        super().read_into(part, position)

    def close(self) -> None:
        """Cancel running requests; may be called twice."""
        self.requests.clear()
        self._prefetcher.close()


def plan_requests(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the requests that fetch these ranges, ascending: small gaps bridged, long runs split equally."""
    runs: list[Range] = []
    for begin, end in merge_ranges(ranges):
        if begin == end:
            continue
        if runs and begin - runs[-1][1] <= GAP_NBYTES:
            begin = runs.pop()[0]
        runs.append((begin, end))
    return tuple(piece for run in runs for piece in cut(*run, LONGEST_REQUEST_NBYTES))


def join_ranges(ranges: Iterable[Planned]) -> list[Planned]:
    """Join ranges of a file with only a small gap between them; keep the order of the first ones."""
    joined: list[list[Any]] = []
    last: dict[InputFile, list[Any]] = {}
    for file, begin, end in ranges:
        if file in last and 0 <= begin - last[file][2] <= _GAP_NBYTES:
            last[file][2] = end
        elif begin < end:
            last[file] = [file, begin, end]
            joined.append(last[file])
    return [(file, begin, end) for file, begin, end in joined]


def cut(begin: int, end: int, most_nbytes: int) -> Iterable[Range]:
    """Split a range into equal pieces of limited length."""
    num_pieces = -(-(end - begin) // most_nbytes)
    cuts = [begin + (end - begin) * piece // num_pieces for piece in range(num_pieces + 1)]
    return pairwise(cuts)
