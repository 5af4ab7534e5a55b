"""Stateless shuffling and sampling: pure functions of their arguments, the same on every rank, machine and version."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate

_NUM_ROUNDS = 6
_LEAST_HALF = 4  # bits: in a smaller domain, some permutations would be much more frequent than others


def shuffled(place: int, count: int, *key: int) -> int:
    """Return the number at a place of the pseudorandom permutation of range(count) that the key selects.

    The permutation is never in memory. It is a Feistel network: of the place as a number of 2h bits, with 4^h >= count
    and h >= 4, the upper half a and the lower half b become b and a ^ F(b), in six rounds; all six are repeated until
    the result is below `count`. In round r, counted from 0, F(b) is the lowest h bits of blake2b, 8 bytes,
    little-endian, of the text "KEY r b": decimal numbers separated by spaces.
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
    """Return an index of `weights`, pseudorandom by key, with probability proportional to its weight.

    It is the first index whose cumulative weight is above u times the sum of all weights: u is the upper 53 bits of
    blake2b, 8 bytes, little-endian, of the key as decimal numbers separated by spaces, divided by 2^53.
    """
    sums = list(accumulate(weights))
    point = (_stir(*key) >> 11) / 2**53 * sums[-1]
    return next(place for place, end in enumerate(sums) if point < end)


def _stir(*numbers: int) -> int:
    return int.from_bytes(blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest(), "little")
