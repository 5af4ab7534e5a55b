"""Orders have everything once and hang on nothing but their key; draws follow the weights."""

from __future__ import annotations

import time
from collections import Counter
from hashlib import blake2b
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.config.flags import parse_training
from runner.data.documents import draw, open_sources, shuffled

KEYS = st.lists(st.integers(0, 2**40), max_size=4)


def order(size: int, *key: int) -> list[int]:
    return [shuffled(place, size, *key) for place in range(size)]


def stirred(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def defined_order(size: int, key: list[int]) -> list[int]:
    """Write out the network's whole table, and follow it until it is back among the numbers below `size`."""
    half = next(bits for bits in count(4) if 4**bits >= size)
    table = []
    for number in range(4**half):
        upper, lower = divmod(number, 2**half)
        for turn in range(6):
            upper, lower = lower, upper ^ stirred("".join(f"{part} " for part in key) + f"{turn} {lower}") % 2**half
        table.append(2**half * upper + lower)
    assert sorted(table) == list(range(4**half))
    found = []
    for place in range(size):
        number = table[place]
        while number >= size:
            number = table[number]
        found.append(number)
    return found


@given(size=st.integers(1, 600), key=KEYS)
def test_an_order_has_every_number_once(size: int, key: list[int]) -> None:
    assert sorted(order(size, *key)) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1500])
def test_order_is_the_one_that_is_defined(size: int) -> None:
    assert order(size, 7, 0, 3) == defined_order(size, [7, 0, 3])


def test_orders_of_few_things_come_all_equally_often() -> None:
    found = Counter(tuple(order(4, 5, epoch)) for epoch in range(480))
    assert len(found) == 24
    assert sum((often - 20) ** 2 / 20 for often in found.values()) < 49.7  # chi square, 23 degrees, 1 in 1000


@pytest.mark.parametrize("weights", [(3.0, 1.0), (0.0, 1.0, 0.0, 4.0), (0.2, 0.3, 0.5), (1e-300, 1e300)])
def test_draws_follow_the_weights(weights: tuple[float, ...]) -> None:
    size, found = 4000, Counter(draw(weights, 11, number) for number in range(4000))
    for place, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(found[place] - size * share) <= 4 * (size * share * (1 - share)) ** 0.5


WEIGHTS = st.lists(st.just(0.0) | st.floats(1e-9, 1e9), min_size=1, max_size=5).filter(any)


@given(weights=WEIGHTS, seed=st.integers(0, 2**40))
def test_draw_is_the_one_that_is_defined(weights: list[float], seed: int) -> None:
    for number in range(20):
        point = (stirred(f"{seed} {number}") // 2**11) / 2**53 * sum(weights)
        assert draw(weights, seed, number) == next(
            place for place in range(len(weights)) if point < sum(weights[: place + 1])
        )


def test_lines_are_found_with_a_beat_for_some_of_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(1000 * '{"text": "a"}\n')
    beats: list[float] = []
    data = parse_training(["--data", str(tmp_path), "--shuffle"]).data
    (source,) = open_sources(data, beat=lambda: beats.append(time.monotonic()))
    assert (source.num_items, len(beats) > 3) == (1000, True)
