"""Orders and draws that are functions of their numbers alone, the same on every rank, machine and version."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate

__all__ = ["draw", "shuffled"]

_NUM_ROUNDS = 6
_LEAST_HALF = 4  # bits: in a smaller domain, some orders of few things would come much more often than others


def shuffled(place: int, count: int, *key: int) -> int:
    """Give which of the numbers below `count` comes at a place, in an order of them that the key names.

    All places have all numbers, each once, and nothing of the order is in memory. It is a Feistel network:
    of the place as a number of 2h bits, 4^h >= count and h >= 4, the upper half a and the lower half b
    become b and a ^ F(b), six times over; all of it again until the outcome is below `count`. In round r,
    the first being 0, F(b) is the lowest h bits of blake2b, 8 bytes, little-endian, of the text
    "KEY r b", in which KEY and all else are decimal numbers with a space between them.
    """
    half = max(_LEAST_HALF, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        upper, lower = place >> half, place & mask
        for number in range(_NUM_ROUNDS):
            upper, lower = lower, upper ^ (_stir(*key, number, lower) & mask)
        place = upper << half | lower
        if place < count:
            return place


def draw(weights: Sequence[float], *key: int) -> int:
    """Give one of the places in `weights`, each as often among all keys as its weight says.

    It is the first whose weight, added to those before it, is above u times the sum of all: u is the upper
    53 bits of blake2b, 8 bytes, little-endian, of the key as decimal numbers with a space between them,
    over 2^53.
    """
    sums = list(accumulate(weights))
    point = (_stir(*key) >> 11) / 2**53 * sums[-1]
    return next(place for place, end in enumerate(sums) if point < end)


def _stir(*numbers: int) -> int:
    return int.from_bytes(blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest(), "little")
