"""Few rows of a matrix in which every pair of values still occurs, instead of the whole product."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row")


def covering(
    rows: Sequence[Row], columns: Callable[[Row], Sequence[Hashable]], covered: Iterable[Row] = ()
) -> tuple[Row, ...]:
    """Choose rows with every pair of values of two columns that any row has, less the pairs that `covered` has.

    A column of two fields together, such as (ranks, weights), makes triples of its pairs.
    """
    pairs = [frozenset(combinations(enumerate(columns(row)), 2)) for row in rows]
    missing = set().union(*pairs)
    for row in covered:
        missing.difference_update(combinations(enumerate(columns(row)), 2))
    chosen = []
    while missing:
        chosen.append(max(range(len(rows)), key=lambda index: len(pairs[index] & missing)))
        missing -= pairs[chosen[-1]]
    return tuple(rows[index] for index in sorted(chosen))
