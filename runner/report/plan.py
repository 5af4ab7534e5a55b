"""What the schedule's plan makes of the times that were measured. No torch."""

from __future__ import annotations

from manifests.errors import UserError
from manifests.schedules import Timeline, simulate
from runner.pipeline.timetable import find_timetable
from runner.profiling.step_times import stage_costs
from runner.report.read import Traces

__all__ = ["planned"]


def planned(traces: Traces) -> Timeline:
    """Simulate the schedule of a traced run with the time that each stage took for a microbatch.

    Transfers are taken to be free: what they cost shows as the difference to what was measured.

    Raises:
        UserError: the schedule's file is gone.
    """
    try:
        timetable = find_timetable(traces.schedule, traces.placement, traces.num_microbatches)
    except UserError as error:
        raise error.within(str(traces.folder)) from error
    return simulate(
        timetable.planned(traces.num_microbatches), stage_costs(*(traces.seconds_of(kind) for kind in "FBIWL"))
    )
