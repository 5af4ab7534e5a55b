"""Ranges become few requests, and a reader fetches ahead in bounded memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stores.base import Range
from stores.prefetch import GAP_NBYTES, LONGEST_REQUEST_NBYTES, NUM_PARALLEL, RangeReader, plan_requests
from stores.workers import Take, for_each, share_out

MIB = 1 << 20
ranges_of_files = st.lists(
    st.builds(lambda begin, nbytes: (begin, begin + nbytes), st.integers(0, 200 * MIB), st.integers(0, 40 * MIB)),
    max_size=8,
)


class Source:
    """Bytes in memory, given slowly, that remember how they were asked for."""

    def __init__(self, nbytes: int, delay_s: float = 0.0, num_together: int = 1) -> None:
        self.data = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]  # 251 is prime: no two blocks are equal
        self.delay_s = delay_s
        self.asked: list[Range] = []
        self.most_at_once = self._at_once = self.num_finished = 0
        self._lock, self._barrier = threading.Lock(), threading.Barrier(num_together)

    def fetch(self, into: memoryview, position: int, stop: threading.Event) -> None:
        with self._lock:
            self.asked.append((position, position + len(into)))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        self._barrier.wait(60)
        into[:] = self.data[position : position + len(into)]
        stopped = stop.wait(self.delay_s)
        with self._lock:
            self._at_once -= 1
            self.num_finished += not stopped
        if stopped:
            raise CancelledError


def read(reader: RangeReader, begin: int, end: int, block_nbytes: int = MIB) -> bytes:
    data = bytearray(end - begin)
    for first in range(begin, end, block_nbytes):
        last = min(first + block_nbytes, end)
        reader.read_into(memoryview(data)[first - begin : last - begin], first)
    return bytes(data)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return soon after something is so, and let whatever else would happen have its time too."""
    deadline = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)


@given(ranges_of_files)
def test_requests_hold_each_wanted_byte_once_and_of_gaps_only_the_short_ones(ranges: list[Range]) -> None:
    requests = plan_requests(ranges)
    assert all(0 < end - begin <= LONGEST_REQUEST_NBYTES for begin, end in requests)
    assert all(ahead[1] <= behind[0] for ahead, behind in pairwise(requests))
    edges = sorted({edge for range_ in (*ranges, *requests) for edge in range_})
    gap = 0  # bytes since the last wanted one
    for begin, end in pairwise(edges):
        is_wanted = any(first <= begin and end <= last for first, last in ranges)
        is_fetched = any(first <= begin and end <= last for first, last in requests)
        assert is_fetched or not is_wanted
        gap = 0 if is_wanted else gap + end - begin
        assert gap <= GAP_NBYTES or not is_fetched


@pytest.mark.parametrize(
    ("ranges", "requests"),
    [
        ([], ()),
        ([(5, 5)], ()),
        ([(0, 8)], ((0, 8),)),
        ([(0, 8), (8 + MIB, 9 + MIB)], ((0, 9 + MIB),)),
        ([(0, 8), (9 + MIB, 10 + MIB)], ((0, 8), (9 + MIB, 10 + MIB))),
        ([(0, 16 * MIB)], ((0, 16 * MIB),)),
        ([(0, 18 * MIB)], ((0, 9 * MIB), (9 * MIB, 18 * MIB))),
    ],
)
def test_gaps_of_a_mebibyte_are_bridged_and_runs_above_16_cut_evenly(
    ranges: list[Range], requests: tuple[Range, ...]
) -> None:
    assert plan_requests(ranges) == requests


def test_reader_gives_the_bytes_of_its_ranges_in_blocks_of_any_size() -> None:
    source = Source(40 * MIB)
    ranges = [(3, 20 * MIB), (25 * MIB, 25 * MIB + 7), (39 * MIB, 40 * MIB)]
    for block_nbytes in (MIB - 1, 64 * MIB):
        reader = RangeReader(source.fetch, ranges)
        assert b"".join(read(reader, *range_, block_nbytes) for range_ in ranges) == b"".join(
            source.data[begin:end] for begin, end in ranges
        )
        reader.close()
    assert sorted(source.asked) == sorted(plan_requests(ranges) * 2)


def test_reader_fetches_ahead_but_never_more_than_its_share() -> None:
    source = Source(6 * LONGEST_REQUEST_NBYTES)
    reader = RangeReader(source.fetch, [(0, len(source.data))])
    read(reader, 0, MIB)
    wait_until(lambda: len(source.asked) >= NUM_PARALLEL)
    assert sorted(source.asked) == [
        (n * LONGEST_REQUEST_NBYTES, (n + 1) * LONGEST_REQUEST_NBYTES) for n in range(NUM_PARALLEL)
    ]
    read(reader, MIB, LONGEST_REQUEST_NBYTES)
    wait_until(lambda: len(source.asked) >= NUM_PARALLEL + 1)
    assert len(source.asked) == NUM_PARALLEL + 1
    reader.close()


def test_requests_run_at_the_same_time() -> None:
    source = Source(3 * NUM_PARALLEL * LONGEST_REQUEST_NBYTES, num_together=NUM_PARALLEL)
    reader = RangeReader(source.fetch, [(0, len(source.data))])
    assert read(reader, 0, len(source.data)) == source.data
    assert source.most_at_once == NUM_PARALLEL
    reader.close()


def test_close_does_not_wait_for_what_is_on_its_way() -> None:
    source = Source(80 * MIB, delay_s=30)
    reader = RangeReader(source.fetch, [(0, 80 * MIB)])

    def read_until_stopped() -> None:
        with pytest.raises(CancelledError):
            read(reader, 0, MIB)

    reading = threading.Thread(target=read_until_stopped)
    reading.start()
    wait_until(lambda: source.most_at_once >= NUM_PARALLEL)
    reader.close()
    reader.close()
    reading.join()
    assert source.num_finished == 0


def test_far_apart_short_ranges_are_fetched_a_few_ahead_and_skipped_ones_not() -> None:
    source = Source(64 * MIB)
    begins = range(0, 64 * MIB, 2 * MIB)
    reader = RangeReader(source.fetch, [(begin, begin + 100) for begin in begins])
    try:
        assert read(reader, 0, 100) == source.data[:100]
        wait_until(lambda: len(source.asked) == 1 + NUM_PARALLEL)
        assert len(source.asked) == 1 + NUM_PARALLEL
        assert read(reader, begins[20], begins[20] + 100) == source.data[begins[20] : begins[20] + 100]
        wait_until(lambda: len(source.asked) == 2 + 2 * NUM_PARALLEL)
        assert not {begin for begin, _ in source.asked} & set(begins[6:20])
    finally:
        reader.close()


# Threads share out a sequence: every item once, neighbours to one thread, the first failure ends all.


def test_threads_take_consecutive_items_from_the_ends_of_parts() -> None:
    begun, lock = dict[int, int](), threading.Lock()
    barrier = threading.Barrier(4)

    def run(take: Take[int], stop: threading.Event) -> None:
        first = take()
        assert first is not None
        with lock:
            begun[first] = threading.get_ident()
        barrier.wait(10)
        while take() is not None:
            pass

    share_out(range(100), run, 4)
    assert sorted(begun) == [0, 49, 50, 99]
    assert len(set(begun.values())) == 4


def test_items_in_order_are_taken_from_the_front_by_all() -> None:
    found, both = list[int](), threading.Barrier(2)

    def run(take: Take[int], stop: threading.Event) -> None:
        for _ in range(5):
            both.wait(10)
            if (item := take()) is not None:
                found.append(item)
            both.wait(10)
            assert sorted(found) == list(range(len(found)))

    share_out(range(9), run, in_order=True)
    assert sorted(found) == list(range(9))


def test_first_failure_is_raised_not_what_it_stopped() -> None:
    both = threading.Barrier(2)

    def work(item: int, stop: threading.Event) -> None:
        both.wait(10)
        if item == 0:
            raise ZeroDivisionError
        assert stop.wait(10)
        raise CancelledError

    with pytest.raises(ZeroDivisionError):
        for_each(range(2), work, 2)
