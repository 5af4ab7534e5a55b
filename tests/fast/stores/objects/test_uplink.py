"""How many parts an upload sends at a time, and how long each may take."""

from __future__ import annotations

import pytest

from stores.objects.uplink import LEAST_BYTES_PER_S, LONGEST_PART_S, NUM_PARTS, Uplink, part_nbytes

PART = part_nbytes(0)


def send(uplink: Uplink, clock: list[float], nbytes: int, bytes_per_s: float) -> None:
    """Send an upload in pieces that each wait for the line."""
    sent = uplink.begin()
    for _ in range(nbytes // PART):
        with sent.sending(PART):
            clock[0] += PART / bytes_per_s
    with sent.finishing():
        clock[0] += 0.1


def test_slow_line_gets_fewer_parts_at_a_time_and_a_fast_one_all() -> None:
    clock = [0.0]
    uplink = Uplink(lambda: clock[0])
    assert (uplink.num_parts(PART), uplink.num_parts(PART, 16)) == (NUM_PARTS, 16)
    send(uplink, clock, 64 << 20, 0.1e6)
    assert (uplink.num_parts(PART), uplink.num_parts(PART, 16)) == (1, 1)
    send(uplink, clock, 64 << 20, 0.9e6)
    assert uplink.num_parts(PART) == 2
    send(uplink, clock, 64 << 20, 500e6)
    assert uplink.num_parts(PART) == NUM_PARTS


@pytest.mark.parametrize(
    ("nbytes", "part_mib"), [(0, 5), (162_000_000, 5), (400 << 20, 7), (512 << 20, 8), (78 << 30, 8)]
)
def test_parts_of_a_shorter_object_are_shorter_so_that_more_are_sent_at_a_time(nbytes: int, part_mib: int) -> None:
    assert part_nbytes(nbytes) == part_mib << 20


def test_small_object_says_nothing_about_the_line() -> None:
    clock = [0.0]
    uplink = Uplink(lambda: clock[0])
    send(uplink, clock, PART, 1e3)
    assert uplink.num_parts(PART) == NUM_PARTS


def test_part_may_take_as_long_as_the_slowest_line_needs() -> None:
    assert LONGEST_PART_S * LEAST_BYTES_PER_S >= PART
    assert LONGEST_PART_S > 30 * 2 * NUM_PARTS  # obstore's own limit, were all parts to share one that takes 30 s
