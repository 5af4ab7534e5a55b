"""Items to split, with costs and memory as exact integers, and splits whose ranks stay within limits.

A rank has one stage of every row (virtual index). Going through the ranks in order, all rows advance
together: row k of a loop forward from bound k x P, the second row of a v backward from the end. For fixed
ends of the rows, of two paths to the same positions in all rows but the last, the one further along in
the last row is at least as good (its later stages can only shrink), so a table from positions to the
furthest last position is exact. All ends of the rows are tried in turn.

Source: the argument above, checked against brute force in tests/fast/reshard/layouts/test_balance.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, product
from math import gcd, lcm

from manifests.placement import Placement

MOST_COSTS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Items:
    """Prefix sums: `costs[j] - costs[i]` is the cost of items i to j - 1; `memory[s]` likewise, on stage s."""

    costs: tuple[int, ...]
    memory: tuple[tuple[int, ...], ...]
    memory_limit: int  # per rank
    placement: Placement
    together: frozenset[int]  # bounds to avoid cutting at

    @property
    def num_items(self) -> int:
        return len(self.costs) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Bound s is in `least[s]` to `most[s]`; both rise with s, and `least[S]` is the number of items."""

    least: tuple[int, ...]
    most: tuple[int, ...]


def exact_integers(values: Sequence[float]) -> list[int]:
    """Return the smallest integers in the same proportions.

    A float is taken as the decimal that it prints as, so that 0.1 + 0.2 is 0.3 and ties stay ties.
    """
    ratios = [Fraction(str(value)) for value in values]
    scale = lcm(*(ratio.denominator for ratio in ratios))
    integers = [ratio.numerator * (scale // ratio.denominator) for ratio in ratios]
    divisor = gcd(*integers) or 1
    return [integer // divisor for integer in integers]


def prefix_sums(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))


def pin_windows(num_items: int, num_stages: int, pins: Sequence[tuple[int, int]]) -> Windows | None:
    """Return the windows of bounds that satisfy each (item, stage) pin; None when pins conflict."""
    least = [0] * num_stages + [num_items]
    most = [0] + [num_items] * num_stages
    for item, stage in pins:
        for bound in range(stage + 1):
            most[bound] = min(most[bound], item)
        for bound in range(stage + 1, num_stages + 1):
            least[bound] = max(least[bound], item + 1)
    if any(low > high for low, high in zip(least, most, strict=True)):
        return None
    return Windows(least=tuple(least), most=tuple(most))


def tighten(items: Items, windows: Windows, bound: int) -> Windows | None:
    """Narrow the windows to what stages of cost `bound` or less can reach; None when there is no split.

    Cutting as late as possible leaves the least for later stages, so it finds a split whenever one exists.
    """
    costs, limit = items.costs, items.memory_limit
    most, least = [0], [items.num_items]
    for stage in range(len(windows.most) - 1):
        here, memory = most[-1], items.memory[stage]
        there = min(
            bisect_right(costs, costs[here] + bound) - 1,
            bisect_right(memory, memory[here] + limit) - 1,
            windows.most[stage + 1],
        )
        if there < windows.least[stage + 1]:
            return None
        most.append(there)
    for stage in range(len(windows.most) - 2, -1, -1):
        here, memory = least[-1], items.memory[stage]
        least.append(
            max(
                bisect_left(costs, costs[here] - bound),
                bisect_left(memory, memory[here] - limit),
                windows.least[stage],
            )
        )
    return Windows(least=tuple(reversed(least)), most=tuple(most))


def possible_rank_costs(items: Items, bound: int) -> list[int] | None:
    """Return the sorted possible costs of a rank whose stages cost `bound` or less each; None when too many."""
    of_stage: set[int] = set()
    for start, done in enumerate(items.costs):
        stop = bisect_right(items.costs, done + bound)
        of_stage.update(reached - done for reached in items.costs[start:stop])
        if len(of_stage) > MOST_COSTS:
            return None
    of_rank = {0}
    for _ in range(items.placement.num_virtual):
        if len(of_rank) * len(of_stage) > MOST_COSTS**2:
            return None
        of_rank = {rank + stage for rank in of_rank for stage in of_stage}
    return sorted(of_rank)


class OutOfStepsError(Exception):
    """The search hit its step limit; whether a split exists is unknown."""


class Steps:
    """The number of steps that a search may still take."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def take(self, count: int) -> None:
        self.remaining -= count
        if self.remaining < 0:
            raise OutOfStepsError


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The stages of one virtual index, in rank order.

    `least[r]` and `most[r]` bound the position before rank r; a row that runs backward counts positions
    from the end.
    """

    costs: tuple[int, ...]  # prefix sums
    memory: tuple[tuple[int, ...], ...]  # on each rank
    least: tuple[int, ...]
    most: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The highest cost of a stage and of a rank, and the most memory of a rank."""

    stage: int
    rank: int
    memory: int


def fit_ranks(items: Items, windows: Windows, limits: Limits, steps: Steps) -> tuple[int, ...] | None:
    """Return bounds with every stage and rank within the limits; None if there are none.

    `windows` are those for stages within `limits.stage`.
    """
    if items.costs[-1] > limits.rank * items.placement.num_ranks:
        return None
    if min(sums[-1] for sums in items.memory) > limits.memory * items.placement.num_ranks:
        return None
    for ends in _row_ends(items, windows, limits.stage):
        steps.take(1)
        walk = _walk(_rows(items, windows, ends), items.placement.num_ranks, limits, steps)
        if walk is not None:
            return _bounds(walk, items)
    return None


def _row_ends(items: Items, windows: Windows, bound: int) -> Iterator[tuple[int, ...]]:
    """Yield every choice of where one row ends and the next begins, the middle ones first."""
    num_ranks, num_rows = items.placement.num_ranks, items.placement.num_virtual
    bounds = [row * num_ranks for row in range(1, num_rows)]
    for inner in product(*(_middle_first(windows.least[at], windows.most[at]) for at in bounds)):
        ends = (0, *inner, items.num_items)
        costs = [items.costs[end] for end in ends]
        if all(0 <= after - before <= bound * num_ranks for before, after in pairwise(costs)):
            yield ends


def _middle_first(low: int, high: int) -> list[int]:
    return sorted(range(low, high + 1), key=lambda value: abs(2 * value - low - high))


def _rows(items: Items, windows: Windows, ends: Sequence[int]) -> list[Row]:
    num_ranks, num_items = items.placement.num_ranks, items.num_items
    rows = []
    for number, (start, stop) in enumerate(pairwise(ends)):
        first, last = number * num_ranks, (number + 1) * num_ranks
        costs, memory = items.costs, items.memory[first:last]
        least, most = windows.least[first + 1 : last], windows.most[first + 1 : last]
        if items.placement.style == "v" and number == 1:
            costs, memory = _reversed(costs), tuple(_reversed(sums) for sums in reversed(memory))
            least, most = (
                tuple(num_items - end for end in reversed(most)),
                tuple(num_items - end for end in reversed(least)),
            )
            start, stop = num_items - stop, num_items - start
        rows.append(
            Row(
                costs=costs,
                memory=memory,
                least=(start, *(max(start, end) for end in least), stop),
                most=(start, *(min(stop, end) for end in most), stop),
            )
        )
    return rows


def _reversed(sums: Sequence[int]) -> tuple[int, ...]:
    return tuple(sums[-1] - value for value in reversed(sums))


def _walk(rows: list[Row], num_ranks: int, limits: Limits, steps: Steps) -> list[tuple[int, ...]] | None:
    """Return the positions in all rows before each rank and after the last; None if there are none."""
    *free, last = rows
    start = tuple(row.least[0] for row in free)
    # Positions in all rows but the last -> furthest position in the last, and the previous positions.
    tables: list[dict[tuple[int, ...], tuple[int, tuple[int, ...]]]] = [{start: (last.least[0], start)}]
    all_done = sum(row.costs[row.least[-1]] for row in rows)
    for rank in range(num_ranks):
        least_done = all_done - (num_ranks - 1 - rank) * limits.rank  # the remaining ranks can do no more
        table: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for here, (at, _) in tables[-1].items():
            ways = _ways(free, here, rank, limits)
            steps.take(1 + len(ways))
            for there, load in ways:
                to = _furthest(last, at, rank, limits, load)
                if to < last.least[rank + 1] or (there in table and to <= table[there][0]):
                    continue
                done = last.costs[to] + sum(row.costs[end] for row, end in zip(free, there, strict=True))
                if done >= least_done:
                    table[there] = (to, here)
        if not table:
            return None
        tables.append(table)
    (here,) = tables[-1]
    path = []
    for table in reversed(tables):
        at, before = table[here]
        path.append((*here, at))
        here = before
    return path[::-1]


def _ways(
    rows: list[Row], here: tuple[int, ...], rank: int, limits: Limits
) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """Return every way for these rows to advance by one stage, with the rank's cost and memory after it."""
    ways: list[tuple[tuple[int, ...], tuple[int, int]]] = [((), (0, 0))]
    for row, at in zip(rows, here, strict=True):
        sums = row.memory[rank]
        ways = [
            ((*ends, end), (cost + row.costs[end] - row.costs[at], memory + sums[end] - sums[at]))
            for ends, (cost, memory) in ways
            for end in range(max(at, row.least[rank + 1]), _furthest(row, at, rank, limits, (cost, memory)) + 1)
        ]
    return ways


def _furthest(row: Row, at: int, rank: int, limits: Limits, load: tuple[int, int]) -> int:
    """Return the furthest end of the row's stage on this rank, which already has `load` (cost, memory)."""
    (cost, memory), sums = load, row.memory[rank]
    return min(
        bisect_right(row.costs, row.costs[at] + min(limits.stage, limits.rank - cost)) - 1,
        bisect_right(sums, sums[at] + limits.memory - memory) - 1,
        row.most[rank + 1],
    )


def _bounds(walk: list[tuple[int, ...]], items: Items) -> tuple[int, ...]:
    """Concatenate the rows."""
    num_ranks, num_items = items.placement.num_ranks, items.num_items
    rows = [list(row) for row in zip(*walk, strict=True)]
    if items.placement.style == "v":
        rows[1] = [num_items - end for end in reversed(rows[1])]
    bounds = [end for row in rows for end in row[:num_ranks]]
    return (*bounds, num_items)
