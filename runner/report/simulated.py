"""Simulate the schedule of a run with its measured times. No torch."""

from __future__ import annotations

from manifests.errors import UserError
from manifests.schedules import Timeline, simulate
from runner.pipeline.timetable import find_timetable
from runner.profiling.step_times import stage_costs
from runner.report.read import Traces


def planned(traces: Traces) -> Timeline:
    """Simulate the schedule of a traced run with the time that each stage took for a microbatch.

    Transfers are assumed to be free: their cost is the difference to the measured time.

    Raises:
        UserError: the schedule file is missing.
    """
    try:
        timetable = find_timetable(traces.schedule, traces.placement, traces.num_microbatches)
    except UserError as error:
        raise error.within(str(traces.folder)) from error
    return simulate(
        timetable.planned(traces.num_microbatches), stage_costs(*(traces.seconds_of(kind) for kind in "FBIWL"))
    )
