"""What the schedule's plan makes of the times that were measured. No torch."""

from __future__ import annotations

from manifests.schedules import Costs, Timeline, compute_part, simulate
from runner.report.read import Traces
from runner.timetable import find_timetable

__all__ = ["planned"]


def planned(traces: Traces) -> Timeline:
    """Simulate the schedule of a traced run with the time that each stage took for a microbatch.

    Transfers are taken to be free: what they cost shows as the difference to what was measured.

    Raises:
        UserError: the schedule's file is gone.
    """
    timetable = find_timetable(traces.schedule, traces.placement, traces.num_microbatches)
    table = compute_part(timetable.training(traces.num_microbatches))
    forward, backward, inputs, weights, loss = (traces.seconds_of(kind) for kind in "FBIWL")
    # A stage has whole backwards or split ones, or both: whole ones are worth their halves.
    halves = [(i, w) if i or w else (b / 2, b / 2) for b, i, w in zip(backward, inputs, weights, strict=True)]
    return simulate(
        table,
        Costs(
            forward_s=tuple(f + extra for f, extra in zip(forward, loss, strict=True)),
            input_s=tuple(i for i, _ in halves),
            weight_s=tuple(w for _, w in halves),
        ),
    )
