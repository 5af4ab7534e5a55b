"""Finds the best contiguous split: no other has a cheaper slowest stage.

Among the splits that fit in memory and satisfy the pins, the result has, in this order,

1. the least cost of the slowest stage;
2. the least cost of the slowest rank (a rank's stages together: what a microbatch costs it);
3. even stages: fewest cuts inside `together`, least sum of squared costs, then of squared numbers of
   items; of equals the one whose cuts come earliest.

With one stage per rank all of it is exact. With several, 1 and 2 are, unless the search hit its step limit,
which `Split.proven` tells (two stages per rank are far from it; with three or more, 1 is still exact when
there is no memory limit); for 3, stages are evened out P neighbors at a time, the others fixed, until
nothing changes.

Method: stages of cost B or less suffice if and only if cutting as late as B allows reaches the end, so
bisection finds 1. Ranks with several stages are searched by `reshard.layouts.items`. All arithmetic is on
integers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from manifests.placement import Placement
from reshard.layouts.items import (
    Items,
    Limits,
    OutOfStepsError,
    Steps,
    Windows,
    exact_integers,
    fit_ranks,
    pin_windows,
    possible_rank_costs,
    prefix_sums,
    tighten,
)

T = TypeVar("T")

MOST_STEPS = 1_000_000  # about a second


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Items to split into contiguous stages, in order. Costs and memory are additive and not negative.

    On stage s an item needs `memory`, plus `activations` for each of `in_flight[s]` microbatches.
    """

    costs: tuple[float, ...]  # per item, any unit
    placement: Placement
    memory: tuple[float, ...] = ()  # per item, any unit; unused without a limit
    activations: tuple[float, ...] = ()  # per item and microbatch, in the unit of memory
    in_flight: tuple[int, ...] = ()  # per stage; empty: none
    memory_limit: float | None = None  # of one rank, over all its stages
    pins: tuple[tuple[int, int], ...] = ()  # (item, stage)
    together: frozenset[int] = frozenset()  # bounds to avoid cutting at, all else being equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Stage s is items `bounds[s]` to `bounds[s + 1] - 1`."""

    bounds: tuple[int, ...]
    proven: bool  # False: the search hit its step limit; a better split may exist


def solve(problem: Problem) -> Split | None:
    """Return the best split; None if none was found that satisfies the pins and the memory limit."""
    items = _items(problem)
    windows = pin_windows(items.num_items, problem.placement.num_stages, problem.pins)
    if windows is None:
        return None
    search = _Search(items, windows)
    bounds = search.best()
    return Split(bounds=bounds, proven=search.proven) if bounds else None


def _items(problem: Problem) -> Items:
    num_items, num_stages = len(problem.costs), problem.placement.num_stages
    memory, activations, limit = [0] * num_items, [0] * num_items, 0
    if problem.memory_limit is not None:
        *both, limit = exact_integers((*problem.memory, *(problem.activations or activations), problem.memory_limit))
        memory, activations = both[:num_items], both[num_items:]
    in_flight = problem.in_flight or (0,) * num_stages
    sums = {
        number: prefix_sums([fixed + number * more for fixed, more in zip(memory, activations, strict=True)])
        for number in set(in_flight)
    }
    return Items(
        costs=prefix_sums(exact_integers(problem.costs)),
        memory=tuple(sums[number] for number in in_flight),
        memory_limit=limit,
        placement=problem.placement,
        together=problem.together,
    )


class _Search:
    def __init__(self, items: Items, windows: Windows) -> None:
        self.items, self.windows = items, windows
        self.num_ranks, self.num_virtual = items.placement.num_ranks, items.placement.num_virtual
        self.steps_left, self.proven = MOST_STEPS, True

    def best(self) -> tuple[int, ...] | None:
        total, num_stages = self.items.costs[-1], len(self.windows.most) - 1
        least = -(-total // num_stages)
        reached = _first(least, total, lambda bound: tighten(self.items, self.windows, bound))
        if reached is None:
            return None
        bound, windows = reached
        caps = [Caps(cost=bound, memory=self.items.memory_limit, memory_sums=sums) for sums in self.items.memory]
        bounds = _existing(even_bounds(self.items, caps, windows.least, windows.most))
        if self.num_virtual == 1:
            return bounds
        if max(self._per_rank(self.items.memory, bounds)) > self.items.memory_limit:
            fitted = _first(bound, total, lambda bound: self._fit(bound, total))
            if fitted is None:
                return None
            bound, bounds = fitted
        bounds = self._lower_slowest_rank(bounds, bound)
        return self._even_out(bounds, bound, self._slowest_rank(bounds))

    def _fit(self, bound: int, rank_bound: int) -> tuple[int, ...] | None:
        """Return a split of stages and ranks within these costs and within memory; None if none is found."""
        windows = tighten(self.items, self.windows, bound)
        if windows is None:
            return None
        limits = Limits(stage=bound, rank=rank_bound, memory=self.items.memory_limit)
        steps = Steps(self.steps_left // 4)
        self.steps_left -= steps.remaining
        try:
            return fit_ranks(self.items, windows, limits, steps)
        except OutOfStepsError:
            self.proven = False
            return None
        finally:
            self.steps_left += max(0, steps.remaining)

    def _lower_slowest_rank(self, bounds: tuple[int, ...], bound: int) -> tuple[int, ...]:
        """Return a split with the cheapest slowest rank among those within `bound`."""
        least = max(bound, -(-self.items.costs[-1] // self.num_ranks))
        most = self._slowest_rank(bounds)
        sums = possible_rank_costs(self.items, bound)
        while (middle := _middle(sums, least, most)) is not None:
            lower = self._fit(bound, middle)
            if lower is None:
                least = middle + 1
            else:
                bounds, most = lower, self._slowest_rank(lower)
        return bounds

    def _even_out(self, bounds: tuple[int, ...], bound: int, rank_bound: int) -> tuple[int, ...]:
        """Even out P neighboring stages at a time, the others fixed, until nothing changes.

        In a loop any P neighbors are on P ranks; in a v the first P are, and the last P.
        """
        num_stages = len(bounds) - 1
        step = self.num_ranks if self.items.placement.style == "v" else -(-self.num_ranks // 2)
        before = None
        while bounds != before:
            before = bounds
            for first in range(0, num_stages - self.num_ranks + 1, step):
                bounds = self._even_out_row(bounds, first, bound, rank_bound)
        return bounds

    def _even_out_row(self, bounds: tuple[int, ...], first: int, bound: int, rank_bound: int) -> tuple[int, ...]:
        """Even out stages first to first + P - 1, each within what its rank's other stages leave."""
        stages = range(first, first + self.num_ranks)
        rank_of = self.items.placement.rank_of
        costs = self._per_rank([self.items.costs] * (len(bounds) - 1), bounds)
        memory = self._per_rank(self.items.memory, bounds)
        caps = []
        for stage in stages:
            rank, (start, stop), sums = rank_of(stage), bounds[stage : stage + 2], self.items.memory[stage]
            others_cost = costs[rank] - (self.items.costs[stop] - self.items.costs[start])
            free = self.items.memory_limit - (memory[rank] - (sums[stop] - sums[start]))
            caps.append(Caps(cost=min(bound, rank_bound - others_cost), memory=free, memory_sums=sums))
        ends = bounds[first], bounds[stages.stop]
        least = (ends[0], *(max(ends[0], end) for end in self.windows.least[first + 1 : stages.stop]), ends[1])
        most = (ends[0], *(min(ends[1], end) for end in self.windows.most[first + 1 : stages.stop]), ends[1])
        evened = _existing(even_bounds(self.items, caps, least, most))
        return (*bounds[:first], *evened, *bounds[stages.stop + 1 :])

    def _slowest_rank(self, bounds: tuple[int, ...]) -> int:
        return max(self._per_rank([self.items.costs] * (len(bounds) - 1), bounds))

    def _per_rank(self, of_stage: Sequence[Sequence[int]], bounds: tuple[int, ...]) -> list[int]:
        """Sum, over the stages of each rank, what these prefix sums give for each."""
        totals = [0] * self.num_ranks
        for stage, (sums, (start, stop)) in enumerate(zip(of_stage, pairwise(bounds), strict=True)):
            totals[self.items.placement.rank_of(stage)] += sums[stop] - sums[start]
        return totals


def _first(least: int, most: int, attempt: Callable[[int], T | None]) -> tuple[int, T] | None:
    """Return the first of least to most whose attempt succeeds, as all later ones do, with its result."""
    result = attempt(most)
    if result is None:
        return None
    while least < most:
        middle = (least + most) // 2
        attempted = attempt(middle)
        if attempted is None:
            least = middle + 1
        else:
            most, result = middle, attempted
    return most, result


def _middle(values: Sequence[int] | None, least: int, most: int) -> int | None:
    """Return the middle one of the values in least to most - 1; of all integers there if values is None."""
    if values is None:
        return (least + most) // 2 if least < most else None
    first, last = bisect_left(values, least), bisect_left(values, most)
    return values[(first + last) // 2] if first < last else None


def _existing(bounds: tuple[int, ...] | None) -> tuple[int, ...]:
    assert bounds is not None  # the caps come from bounds that satisfy them
    return bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """Cost and memory limits of one stage, and the prefix sums of its items' memory there."""

    cost: int
    memory: int
    memory_sums: tuple[int, ...]


def even_bounds(
    items: Items, caps: Sequence[Caps], least: Sequence[int], most: Sequence[int]
) -> tuple[int, ...] | None:
    """Split items `least[0]` to `least[-1]` into as many stages as there are caps; None if nothing fits.

    Among the splits within caps and windows: fewest cuts at `together` bounds, least sum of squared costs,
    least sum of squared numbers of items, earliest cuts. Dynamic programming from the end over (stage,
    position); the three sums are packed into one integer, most significant first.
    """
    costs = items.costs
    count_unit = items.num_items**2 + 1
    together_unit = (costs[-1] ** 2 + 1) * count_unit
    best: dict[int, int] = {most[-1]: 0}
    choices: list[dict[int, int]] = []
    for stage in range(len(caps) - 1, -1, -1):
        cap, better, choice = caps[stage], dict[int, int](), dict[int, int]()
        memory = cap.memory_sums
        ends = sorted(best)
        for start in range(least[stage], most[stage] + 1):
            for end in ends:
                if end < start:
                    continue
                cost = costs[end] - costs[start]
                if cost > cap.cost or memory[end] - memory[start] > cap.memory:
                    break
                total = best[end] + cost * cost * count_unit + (end - start) ** 2
                if end in items.together and stage < len(caps) - 1:
                    total += together_unit
                if start not in better or total < better[start]:
                    better[start], choice[start] = total, end
        best = better
        choices.append(choice)
    if least[0] not in best:
        return None
    bounds = [least[0]]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(bounds)
