"""Simulation of a schedule table with a cost per action: timeline, pipeline bubble and microbatches in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from manifests.errors import ScheduleError
from manifests.schedules.actions import Action, Table, actions_of
from manifests.schedules.order import Result, check_finished, input_of, missing_for, result_of

__all__ = ["StageCosts", "TimedAction", "Timeline", "in_flight", "peak_held", "simulate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """Seconds of each stage for one microbatch, and of a transfer between ranks. B takes as long as I and W together.

    Raises:
        ScheduleError: tuples of different lengths, or a time below 0.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]  # I: gradients of the stage's input
    weight_s: tuple[float, ...]  # W: gradients of its weights
    hop_s: float = 0.0

    def __post_init__(self) -> None:
        if len({len(self.forward_s), len(self.input_s), len(self.weight_s)}) != 1:
            raise ScheduleError(
                "costs",
                f"expected the same number of stages in each, found {len(self.forward_s)} forward, "
                f"{len(self.input_s)} input and {len(self.weight_s)} weight times",
                code="schedule.invalid-costs",
            )
        # NaN fails every comparison.
        if not all(0 <= seconds < inf for seconds in (*self.forward_s, *self.input_s, *self.weight_s, self.hop_s)):
            problem = "expected finite times of at least 0 seconds"
            raise ScheduleError("costs", problem, code="schedule.invalid-costs")

    @classmethod
    def of(
        cls, forward_s: Sequence[float], backward_s: Sequence[float], *, input_share: float = 0.5, hop_s: float = 0.0
    ) -> StageCosts:
        """Return costs from the whole backward of each stage, of which I takes `input_share`.

        One half is right for matrix products: one for the input, one for the weights. The first stage does not send
        a gradient: torch runs its whole backward as W.
        """
        shares = [input_share if stage else 0.0 for stage in range(len(backward_s))]
        return cls(
            forward_s=tuple(forward_s),
            input_s=tuple(seconds * share for seconds, share in zip(backward_s, shares, strict=True)),
            weight_s=tuple(seconds * (1 - share) for seconds, share in zip(backward_s, shares, strict=True)),
            hop_s=hop_s,
        )

    def by_kind(self) -> dict[str, tuple[float, ...]]:
        """Return the seconds of each kind of action, by stage."""
        whole = tuple(map(sum, zip(self.input_s, self.weight_s, strict=True)))
        return {"F": self.forward_s, "I": self.input_s, "W": self.weight_s, "B": whole}


class TimedAction(NamedTuple):
    """One action on the timeline, in seconds from the first action's start. A step has up to half a million."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The actions of each rank over time. Between its spans a rank waits."""

    ranks: tuple[tuple[TimedAction, ...], ...]
    makespan_s: float
    busy_s: tuple[float, ...]  # of each rank

    @property
    def bubble(self) -> float:
        """The pipeline bubble: the fraction of all ranks' time in which they wait, from 0 to 1."""
        total_s = len(self.ranks) * self.makespan_s
        return max(0.0, 1 - sum(self.busy_s) / total_s) if total_s else 0.0


def simulate(table: Table, costs: StageCosts, begins_s: Sequence[float] | None = None) -> Timeline:
    """Return the timeline of a table, in which each action starts as soon as its rank and its input are ready.

    Transfers take `hop_s` and do not block ranks. An Overlap takes as long as its two actions in sequence. Each rank
    starts at its time in `begins_s`; None: all at 0.

    Raises:
        ScheduleError: costs of another number of stages; a deadlock.
    """
    placement = table.placement
    if len(costs.forward_s) != placement.num_stages:
        problem = f"expected {placement.num_stages} stages, found {len(costs.forward_s)}"
        raise ScheduleError("costs", problem, code="schedule.invalid-costs")
    num_stages, seconds_of = placement.num_stages, costs.by_kind()
    spans: list[list[TimedAction]] = [[] for _ in table.ranks]
    free_s, busy_s = list(begins_s or [0.0] * len(spans)), [0.0] * len(spans)
    left_s: dict[Result, tuple[float, int]] = {}  # when each result left its rank, and that rank
    at, ready, waiting = [0] * len(spans), deque(range(len(spans))), dict[Result, list[int]]()
    while ready:
        rank = ready.popleft()
        steps, time_s = table.ranks[rank], free_s[rank]
        while at[rank] < len(steps):
            actions = actions_of(steps[at[rank]])
            if missing := missing_for(actions, num_stages, left_s):
                waiting.setdefault(missing, []).append(rank)
                break
            at[rank] += 1
            for action in actions:
                if needed := input_of(action, num_stages):
                    ready_s, source = left_s[needed]
                    time_s = max(time_s, ready_s if source == rank else ready_s + costs.hop_s)
                start_s, seconds = time_s, seconds_of[action.kind][action.stage]
                time_s += seconds
                busy_s[rank] += seconds
                spans[rank].append(TimedAction(action, start_s, time_s))
            for action in actions:
                result = result_of(action)
                left_s[result] = time_s, rank
                if result in waiting:
                    ready.extend(waiting.pop(result))
        free_s[rank] = time_s
    check_finished(table.ranks, at, placement, left_s)
    return Timeline(
        ranks=tuple(map(tuple, spans)),
        makespan_s=max(free_s),
        busy_s=tuple(busy_s),
    )


def in_flight(table: Table) -> tuple[int, ...]:
    """Return the most microbatches that each stage has in flight at once; see `peak_held`."""
    held = [0] * table.placement.num_stages
    peaks = held.copy()
    for steps in table.ranks:
        for step in steps:
            for action in actions_of(step):
                stage, kind = action.stage, action.kind
                if kind == "F":
                    held[stage] += 1
                    if held[stage] > peaks[stage]:
                        peaks[stage] = held[stage]
                elif kind != "I":
                    held[stage] -= 1
    return tuple(peaks)


def peak_held(table: Table, stage_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return each rank's peak, where a microbatch in flight on stage i takes `stage_sizes[i]`.

    A microbatch is in flight on a stage from the start of its F to the end of its B or W. The order of a rank's actions
    determines the peak; times do not matter.
    """
    placement = table.placement
    if placement.num_virtual == 1:
        sizes = [count * size for count, size in zip(in_flight(table), stage_sizes, strict=True)]
        return tuple(sizes[placement.stages_on(rank)[0]] for rank in range(placement.num_ranks))
    peaks = []
    for steps in table.ranks:
        held = peak = 0
        for action in (action for step in steps for action in actions_of(step)):
            if action.kind == "F":
                held += stage_sizes[action.stage]
                peak = max(peak, held)
            elif action.kind != "I":
                held -= stage_sizes[action.stage]
        peaks.append(peak)
    return tuple(peaks)
