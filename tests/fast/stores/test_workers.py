"""Threads share out a sequence: every item once, neighbours to one thread, the first failure ends all."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from stores.workers import Take, for_each, share_out


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
