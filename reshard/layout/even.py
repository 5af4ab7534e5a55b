"""The most even split under a cap for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard.layout.items import Items


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
