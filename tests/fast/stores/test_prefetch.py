"""Ranges of remote files are requested ahead, in the order of reading, within their memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from blake3 import blake3

from manifests.errors import ShardError, StoreError
from reshard.copy.engine import InOrder
from reshard.copy.runs import Run, copy_run
from reshard.plans.pack_plan import OutputShard
from stores.base import InputFile
from stores.bundles import TensorAt
from stores.net.retries import Streams
from stores.prefetch import Fetch, Lane, Planned, PlannedReader, Prefetcher, RangeReader

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on a server that counts its requests."""

    data: bytes
    asked: list[tuple[int, int]] = field(default_factory=list, compare=False)
    streams: Streams = field(default_factory=Streams, compare=False)
    before: Callable[[int], object] = field(default=lambda position: None, compare=False)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def fingerprint(self) -> str:
        return str(len(self.data))

    def open(self, ranges: object) -> RangeReader:
        raise AssertionError("opened without a plan")

    def fetching(self) -> Fetch:
        return self._fetch

    def _fetch(self, into: memoryview, position: int, stop: threading.Event) -> None:
        self.before(position)
        self.asked.append((position, position + len(into)))
        into[:] = self.data[position : position + len(into)]


def pattern(nbytes: int, seed: int) -> bytes:
    return bytes((seed + number // 4096 + number) % 251 for number in range(4096)) * (nbytes // 4096)


def read_all(lane: Lane, plans: list[list[Planned]]) -> list[bytes]:
    """Read what is planned, each plan with its own readers, in pieces of 300,000 bytes."""
    found = []
    for plan in plans:
        readers = lane.plan(plan)
        lane.fill()
        for file, begin, end in plan:
            part = bytearray(end - begin)
            for at in range(0, len(part), 300_000):
                readers[file].read_into(memoryview(part)[at : at + 300_000], begin + at)
            found.append(bytes(part))
        for reader in readers.values():
            with closing(reader):
                pass
    return found


@pytest.mark.parametrize("memory_nbytes", [MIB, 5 * MIB, 640 * MIB])
def test_bytes_are_those_of_the_files_and_each_is_requested_once(memory_nbytes: int) -> None:
    files = [Remote(pattern(6 * MIB, seed)) for seed in range(3)]
    plans: list[list[Planned]] = [
        [(files[number], begin, begin + MIB // 2) for begin in range(0, 6 * MIB, MIB) for number in (2, 0, 1)],
        [(files[0], 5 * MIB + MIB // 2, 6 * MIB), (files[0], MIB // 2, MIB), (files[1], 7, 7)],
    ]
    with Prefetcher(1, threading.Event(), memory_nbytes=memory_nbytes) as prefetcher:
        found = read_all(Lane(prefetcher), plans)
    expected = [file.data[begin:end] for plan in plans for file, begin, end in plan if isinstance(file, Remote)]
    assert found == expected
    assert sum(end - begin for file in files for begin, end in file.asked) == sum(map(len, expected))


def test_requests_run_ahead_within_the_memory() -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def before(position: int) -> None:
        begun.release()
        assert gate.wait(10)

    file = Remote(pattern(40 * MIB, 1), before=before)
    more: list[list[Planned]] = [[(file, at * 10 * MIB, (at + 1) * 10 * MIB)] for at in range(4)]
    taken = list[dict[InputFile, PlannedReader]]()

    with Prefetcher(1, threading.Event(), num_streams=20, memory_nbytes=20 * MIB) as prefetcher:

        def take() -> bool:
            if len(taken) == len(more):
                return False
            taken.append(lane.plan(more[len(taken)]))
            return True

        lane = Lane(prefetcher, take)
        lane.fill()
        for _ in range(20):  # requests of 1 MiB, all of which run now
            assert begun.acquire(timeout=10)
        assert len(taken) in (2, 3)
        gate.set()
        part = bytearray(10 * MIB)
        taken[0][file].read_into(memoryview(part), 0)
        assert part == file.data[: 10 * MIB]
        assert len(taken) >= 3
    assert prefetcher.most_running == 20
    assert file.streams.limit == 20


def test_last_requests_are_short_so_that_all_streams_end_together() -> None:
    nbytes = 40 * MIB
    file = Remote(pattern(nbytes, 1))
    ranges: list[list[Planned]] = [[(file, at, at + 10 * MIB)] for at in range(0, nbytes, 10 * MIB)]
    with Prefetcher(1, threading.Event(), num_streams=10, memory_nbytes=80 * MIB) as prefetcher:
        read_all(Lane(prefetcher, nbytes=nbytes), ranges)
    asked = [sum(at <= begin < at + 10 * MIB for begin, _ in file.asked) for at in range(0, nbytes, 10 * MIB)]
    assert asked == [3, 4, 5, 5]  # of at most 4, 3, 2 and 2 MiB


@dataclass(slots=True)
class Written:
    """An output in memory, and how many bytes were written to it without a copy of the response."""

    is_aligned: bool
    data: bytearray = field(default_factory=bytearray)
    lent_nbytes: int = 0

    def write(self, buffer: memoryview, begin: int, end: int, position: int) -> None:
        assert position == 4864 + len(self.data)
        self.data += buffer[begin:end]
        self.lent_nbytes += (end - begin) * buffer.readonly


@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize("reuses", [False, True])
def test_run_is_written_from_the_memory_of_responses_unless_it_must_be_aligned(is_aligned: bool, reuses: bool) -> None:
    file, sizes = Remote(pattern(20 * MIB, 1)), [5 * MIB + 4096, 0, 6 * MIB, 512, 3 * MIB - 512, 0]
    begins = list(accumulate(sizes, initial=8192))
    tensors = [
        TensorAt(f"{begin}", "U8", (size,), file, begin, size, blake3(file.data[begin : begin + size]).digest())
        for begin, size in zip(begins, sizes, strict=False)
    ]
    stop, output, sent = threading.Event(), Written(is_aligned), list[int]()
    with Prefetcher(1, stop, num_streams=8, memory_nbytes=16 * MIB, reuses=reuses) as prefetcher:
        lane = Lane(prefetcher)
        readers = lane.plan([(file, tensor.begin, tensor.begin + tensor.nbytes) for tensor in tensors])
        lane.fill()
        digests = copy_run(Run(tensors, 0, output, position=4864), readers, sent.append, prefetcher)
    assert output.data == file.data[8192 : begins[-1]]
    assert digests == [tensor.digest for tensor in tensors]
    assert output.lent_nbytes == (0 if is_aligned else sum(sizes))
    assert sum(sent) == sum(sizes)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_shard_that_is_kept_is_verified_before_it_is_written_and_requested_once(is_damaged: bool) -> None:
    file = Remote(pattern(9 * MIB, 1))
    digests = [blake3(file.data[:MIB]).digest(), blake3(file.data[MIB:]).digest()]
    known = bytes(32) if is_damaged else digests[0]
    tensors = (
        TensorAt("a", "U8", (MIB,), file, 0, MIB, known),
        TensorAt("b", "U8", (8 * MIB,), file, MIB, 8 * MIB),
    )
    shard = OutputShard(path="s", origins=tensors, header_nbytes=4864)
    output, written = Written(is_aligned=False), list[int]()
    with Prefetcher(1, threading.Event(), memory_nbytes=9 * MIB, reuses=False) as prefetcher:
        source = InOrder(shard, written.append, prefetcher)
        if is_damaged:
            with pytest.raises(ShardError):
                source.hash_and_keep()
            return
        found = source.hash_and_keep()
        source.write(output, found)
    assert list(map(bytes.fromhex, found)) == digests
    assert output.data == file.data
    assert sum(written) == sum(end - begin for begin, end in file.asked) == len(file.data)


class _Lending:
    """A fetch with memory of its own, while `is_fast`."""

    def __init__(self, data: bytes) -> None:
        self.data, self.is_fast, self.num_filled = data, True, 0

    def __call__(self, into: memoryview, position: int, stop: threading.Event) -> None:
        self.num_filled += 1
        into[:] = self.data[position : position + len(into)]

    def lend(self, position: int, nbytes: int, stop: threading.Event) -> memoryview | None:
        return memoryview(self.data)[position : position + nbytes] if self.is_fast else None


def test_failure_of_a_request_is_that_of_the_read() -> None:
    def before(position: int) -> None:
        raise StoreError("server", "refuses", code="store.wrong-answer")

    file = Remote(pattern(MIB, 1), before=before)
    with Prefetcher(1, threading.Event()) as prefetcher:
        readers = Lane(prefetcher).plan([(file, 0, MIB)])
        with pytest.raises(StoreError) as refused:
            readers[file].read_into(memoryview(bytearray(10)), 0)
    assert refused.value.code == "store.wrong-answer"


@pytest.mark.parametrize("is_fast", [True, False])
def test_bytes_in_the_memory_of_a_client_are_lent_from_there(is_fast: bool) -> None:
    fetch = _Lending(pattern(8 * MIB, 1))
    fetch.is_fast = is_fast
    with Prefetcher(1, threading.Event(), num_streams=2, memory_nbytes=8 * MIB) as prefetcher:
        reader = PlannedReader(lane := Lane(prefetcher), fetch)
        lane.add(reader, [(0, 4 * MIB), (4 * MIB, 8 * MIB)])
        lane.fill()
        lent = [reader.lend(at, MIB) for at in range(0, 8 * MIB, MIB)]
        assert all(part is not None and part.obj is fetch.data for part in lent) == is_fast
        assert fetch.num_filled == (0 if is_fast else 2)
