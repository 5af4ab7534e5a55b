"""Where the seconds of a step went, on every pipeline rank. No torch.

# Note [Bubble and communication]
A rank that waits for another cannot tell whether that one still computes or its message is under way, and clocks of
machines differ by more than a message takes. So each rank tells what it can measure by itself: when it began,
counted from the end of the exchange that closed the step before, which all ranks leave together; how long its stages
compute for a microbatch; when its schedule ended, and its gradients were summed. The schedule, run on paper with
those times and with transfers that cost nothing, says when each rank could have ended. What it took beyond that is
communication; what is left of its time is the bubble: waits for ranks that read, compute, or come late themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manifests.schedules import Costs, Table, simulate

__all__ = ["KINDS", "RankTimes", "split_step", "stage_costs"]

KINDS = ("F", "B", "I", "W", "L")  # see `runner.profiling.trace.RanKind`


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Seconds of one pipeline rank from the begin of a step until the norm of its gradients is known, in four parts."""

    data_s: float  # until its batch was there
    compute_s: float  # forwards, losses and backwards
    communication_s: float
    bubble_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """What a rank tells of a step, in seconds."""

    begin_s: float  # of its schedule, from the end of the last exchange
    data_s: float
    compute_s: float
    schedule_s: float
    reduce_s: float  # from the schedule's end until its gradients were summed and squared
    stages: tuple[tuple[float, ...], ...]  # of each own stage, by `KINDS`: the mean time of an action

    @classmethod
    def of(cls, row: Sequence[float]) -> _Told:
        begin_s, data_s, compute_s, schedule_s, reduce_s, *means = row
        stages = tuple(tuple(means[at : at + len(KINDS)]) for at in range(0, len(means), len(KINDS)))
        return cls(
            begin_s=begin_s,
            data_s=data_s,
            compute_s=compute_s,
            schedule_s=schedule_s,
            reduce_s=reduce_s,
            stages=stages,
        )


def split_step(table: Table, rows: Sequence[Sequence[float]], window_s: float) -> tuple[RankTimes, ...]:
    """Split a step into parts, of what each rank tells and of the seconds between this exchange and the last.

    See Note [Bubble and communication].
    """
    told = [_Told.of(row) for row in rows]
    by_stage = {
        stage: means
        for rank, each in enumerate(told)
        for stage, means in zip(table.placement.stages_on(rank), each.stages, strict=True)
    }
    costs = stage_costs(*zip(*(by_stage[stage] for stage in sorted(by_stage)), strict=True))
    timeline = simulate(table, costs, [each.begin_s for each in told])
    ends_s = [spans[-1].end_s for spans in timeline.ranks]
    return tuple(_parts(each, end_s, window_s) for each, end_s in zip(told, ends_s, strict=True))


def stage_costs(
    forward: Sequence[float],
    backward: Sequence[float],
    inputs: Sequence[float],
    weights: Sequence[float],
    loss: Sequence[float],
) -> Costs:
    """Give what actions on each stage cost, of times that were measured; 0 stands for an action that none ran."""
    # A stage has whole backwards or split ones, or both: whole ones are worth their halves.
    halves = [(i, w) if i or w else (b / 2, b / 2) for b, i, w in zip(backward, inputs, weights, strict=True)]
    return Costs(
        forward_s=tuple(f + extra for f, extra in zip(forward, loss, strict=True)),
        input_s=tuple(i for i, _ in halves),
        weight_s=tuple(w for _, w in halves),
    )


def _parts(told: _Told, end_s: float, window_s: float) -> RankTimes:
    waited_s = max(0.0, window_s - told.begin_s - told.compute_s)
    late_s = max(0.0, told.begin_s + told.schedule_s - end_s)
    communication_s = min(waited_s, late_s + told.reduce_s)
    return RankTimes(
        data_s=told.data_s,
        compute_s=told.compute_s,
        communication_s=communication_s,
        bubble_s=waited_s - communication_s,
    )
