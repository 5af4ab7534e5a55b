"""Simulation of a schedule table with a cost per action: timeline, pipeline bubble and microbatches in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from manifests.errors import ScheduleError
from manifests.schedules.actions import Action, Table, actions_of
from manifests.schedules.order import Result, in_order, input_of, result_of

__all__ = ["StageCosts", "TimedAction", "Timeline", "peak_held", "simulate"]


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

    def seconds(self, action: Action) -> float:
        stage = action.stage
        match action.kind:
            case "F":
                return self.forward_s[stage]
            case "I":
                return self.input_s[stage]
            case "W":
                return self.weight_s[stage]
            case "B":
                return self.input_s[stage] + self.weight_s[stage]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedAction:
    """One action on the timeline, in seconds from the first action's start."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The actions of each rank over time. Between its spans a rank waits."""

    ranks: tuple[tuple[TimedAction, ...], ...]
    makespan_s: float
    busy_s: tuple[float, ...]  # of each rank
    peak_by_stage: tuple[int, ...]  # most microbatches in flight at once, see `peak_held`
    peak_by_rank: tuple[int, ...]  # over all stages of the rank

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
    spans: list[list[TimedAction]] = [[] for _ in table.ranks]
    free_s, busy_s = list(begins_s or [0.0] * len(spans)), [0.0] * len(spans)
    left_s: dict[Result, tuple[float, int]] = {}  # when each result left its rank, and that rank
    for rank, step in in_order(table.ranks, placement):
        actions = actions_of(step)
        for action in actions:
            start_s = free_s[rank]
            needed = input_of(action, placement.num_stages)
            if needed is not None:
                ready_s, source = left_s[needed]
                start_s = max(start_s, ready_s if source == rank else ready_s + costs.hop_s)
            seconds = costs.seconds(action)
            spans[rank].append(TimedAction(action=action, start_s=start_s, end_s=start_s + seconds))
            free_s[rank] = start_s + seconds
            busy_s[rank] += seconds
        for action in actions:
            left_s[result_of(action)] = free_s[rank], rank
    one_each = [1] * placement.num_stages
    by_stage: list[list[Action]] = [[] for _ in one_each]
    for span in (span for rank_spans in spans for span in rank_spans):
        by_stage[span.action.stage].append(span.action)
    return Timeline(
        ranks=tuple(map(tuple, spans)),
        makespan_s=max(free_s),
        busy_s=tuple(busy_s),
        peak_by_stage=tuple(_peak(actions, one_each) for actions in by_stage),
        peak_by_rank=peak_held(table, one_each),
    )


def peak_held(table: Table, stage_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return each rank's peak, where a microbatch in flight on stage i takes `stage_sizes[i]`.

    A microbatch is in flight on a stage from the start of its F to the end of its B or W. The order of a rank's actions
    determines the peak; times do not matter.
    """
    return tuple(_peak((action for step in steps for action in actions_of(step)), stage_sizes) for steps in table.ranks)


def _peak(actions: Iterable[Action], stage_sizes: Sequence[int]) -> int:
    held = peak = 0
    for action in actions:
        if action.kind == "F":
            held += stage_sizes[action.stage]
            peak = max(peak, held)
        elif action.kind in "BW":
            held -= stage_sizes[action.stage]
    return peak
