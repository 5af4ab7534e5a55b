"""Layers, experts and shards are numbered without gaps: which numbers are missing among those in use."""

from __future__ import annotations

from collections.abc import Set
from itertools import islice

_MOST = 1000  # of the missing numbers; a name may have any number


def find_missing(numbers: Set[int], expected: range) -> tuple[int, tuple[int, ...]]:
    """Return how many of a range's numbers are not in use, and the first of them.

    Takes time and memory in proportion to `numbers`, however long the range is.
    """
    count = len(expected) - sum(number in expected for number in numbers)
    return count, tuple(islice((number for number in expected if number not in numbers), min(count, _MOST)))
