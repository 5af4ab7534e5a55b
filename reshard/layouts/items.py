"""Items to split: costs and memory as exact integers, and where cuts may be."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
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
    together: frozenset[int] = frozenset()  # bounds to avoid cutting at

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
