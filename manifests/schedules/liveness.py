"""What a table of actions keeps in memory, and until when: microbatches in flight, and tensors from other ranks.

The order of a rank's actions determines the peaks; times do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manifests.placement import Placement
from manifests.schedules.actions import Action, LoweredTable, Table, Transfer, actions_of


def in_flight(table: Table) -> tuple[int, ...]:
    """Return the most microbatches that each stage has in flight at once; see `peak_held`."""
    return peak_held_by_stage(table, [1] * table.placement.num_stages)


def peak_held(
    table: Table,
    stage_sizes: Sequence[int],
    delayed_sizes: Sequence[int] | None = None,
    temporary_sizes: Sequence[tuple[int, int]] | None = None,
) -> tuple[int, ...]:
    """Return each rank's peak, where a microbatch in flight on stage i takes `stage_sizes[i]`.

    A microbatch is in flight on a stage from the start of its F to the end of its B or W. From the start of its I to
    the end of its W it takes `delayed_sizes[i]` more; `temporary_sizes[i]` are during its B, and during its I and W.
    """
    rows = [[action for step in steps for action in actions_of(step)] for steps in table.ranks]
    return _peaks(rows, stage_sizes, delayed_sizes, temporary_sizes)


def peak_held_by_stage(
    table: Table, stage_sizes: Sequence[int], delayed_sizes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return each stage's own peak; see `peak_held`."""
    rows: list[list[Action]] = [[] for _ in range(table.placement.num_stages)]
    for steps in table.ranks:
        for step in steps:
            for action in actions_of(step):
                rows[action.stage].append(action)
    return _peaks(rows, stage_sizes, delayed_sizes, None)


class Peaks(NamedTuple):
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def peak_received(table: LoweredTable) -> Peaks:
    """Return the most tensors from other ranks that each stage, and each rank, has at once.

    A stage has its input and the gradient of its output from their receive to the end of the B or W, which may
    recompute from the one and read the other.
    """
    placement = table.placement
    stage_peaks, rank_peaks = [0] * placement.num_stages, []
    for rank, steps in enumerate(table.ranks):
        stages = placement.stages_on(rank)
        num_remote = {stage: num_remote_neighbors(placement, stage) for stage in stages}
        received = dict.fromkeys(stages, 0)
        total = peak = 0
        for step in steps:
            if isinstance(step, Transfer) and step.kind.startswith("RECV"):
                received[step.stage] += 1
                total += 1
                stage_peaks[step.stage] = max(stage_peaks[step.stage], received[step.stage])
                peak = max(peak, total)
            for action in actions_of(step):
                if action.kind in "BW":
                    received[action.stage] -= num_remote[action.stage]
                    total -= num_remote[action.stage]
        rank_peaks.append(peak)
    return Peaks(tuple(stage_peaks), tuple(rank_peaks))


def num_remote_neighbors(placement: Placement, stage: int) -> int:
    """Return how many of the stages before and after a stage are on other ranks."""
    neighbors = (other for other in (stage - 1, stage + 1) if 0 <= other < placement.num_stages)
    return sum(placement.rank_of(other) != placement.rank_of(stage) for other in neighbors)


def _peaks(
    rows: Iterable[Iterable[Action]],
    sizes: Sequence[int],
    delayed_sizes: Sequence[int] | None,
    temporary_sizes: Sequence[tuple[int, int]] | None,
) -> tuple[int, ...]:
    delayed, temporary = delayed_sizes or [0] * len(sizes), temporary_sizes or [(0, 0)] * len(sizes)
    peaks = []
    for actions in rows:
        size = peak = 0
        for stage, kind, _ in actions:
            if kind == "F":
                size += sizes[stage]
                peak = max(peak, size)
                continue
            if kind == "I":
                size += delayed[stage]
            peak = max(peak, size + temporary[stage][kind != "B"])
            if kind != "I":
                size -= sizes[stage] + (delayed[stage] if kind == "W" else 0)
        peaks.append(peak)
    return tuple(peaks)
