"""The supported schedules, and the stages and microbatches that each of them can run."""

from __future__ import annotations

from difflib import get_close_matches
from itertools import count
from typing import Literal, get_args

from manifests.errors import Parameter, UsageError
from manifests.placement import Placement

ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
SINGLE_STAGE_SCHEDULES = ("GPipe", "1F1B")  # one stage on each rank
V_SCHEDULES: tuple[ScheduleName, ...] = ("ZBVZeroBubble", "DualPipeV")  # two on each rank, in style v
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
_WHERE, _GROUP = Parameter("assumed.schedule"), Parameter("assumed.microbatch_group")


def schedule_named(name: str) -> ScheduleName:
    """Return the schedule of that name, ignoring case."""
    names = {schedule.lower(): schedule for schedule in SCHEDULES}
    if name.lower() in names:
        return names[name.lower()]
    begun = [schedule for schedule in names if name and schedule.startswith(name.lower())]
    close = begun or get_close_matches(name.lower(), names, n=1)
    guess = f"did you mean {names[close[0]]}? " if close else ""
    hint = f"{guess}known schedules: {', '.join(SCHEDULES)}"
    raise UsageError(_WHERE, f"unknown schedule {name!r}", hint, code="schedule.unknown")


def default_schedule(placement: Placement) -> ScheduleName:
    """Return the schedule that is used if none is requested."""
    if placement.style == "v":
        return "ZBVZeroBubble"
    return "1F1B" if placement.num_virtual == 1 else "Interleaved1F1B"


def check_schedule(
    name: str, placement: Placement, num_microbatches: int, *, microbatch_group: int | None = None
) -> ScheduleName:
    """Return the schedule's canonical name, if it supports the placement and the number of microbatches.

    `microbatch_group` is Megatron's, see `schedule_table`.
    """
    schedule = schedule_named(name)
    _check_placement(schedule, placement)
    if schedule == "DualPipeV" and num_microbatches < placement.num_stages:
        raise UsageError(
            _WHERE,
            f"{schedule} requires at least {placement.num_stages} microbatches (stages), found {num_microbatches}",
            f"use {placement.num_stages} microbatches or more, or the schedule ZBVZeroBubble",
            code="schedule.too-few-microbatches",
        )
    if microbatch_group is not None:
        _check_group(schedule, placement.num_ranks, num_microbatches, microbatch_group)
    elif schedule in _IN_ROUNDS:
        _check_rounds(schedule, placement.num_ranks, num_microbatches)
    return schedule


def default_group(num_ranks: int, num_microbatches: int) -> int:
    """Return how many microbatches pass through a stage before the rank switches to its next one, as torch does.

    There are as many rounds as complete sets of `num_ranks` microbatches, at least one.
    """
    return num_microbatches // max(1, num_microbatches // num_ranks)


def _check_placement(schedule: ScheduleName, placement: Placement) -> None:
    num_ranks, per_rank, style = placement.num_ranks, placement.num_virtual, placement.style
    if schedule in SINGLE_STAGE_SCHEDULES and per_rank != 1:
        other = "ZBVZeroBubble" if style == "v" else "Interleaved1F1B"
        problem = f"requires 1 stage per rank, found {per_rank}"
        hint = f"use the schedule {other}, or the layout pp={num_ranks}"
    elif schedule in V_SCHEDULES and style != "v":
        others = "GPipe or 1F1B" if per_rank == 1 else "Interleaved1F1B or InterleavedZeroBubble"
        problem = f"requires 2 stages per rank in style v, found {per_rank} in style loop"
        hint = f"use the layout pp={num_ranks},vpp=2,style=v, or the schedule {others}"
    elif schedule not in SINGLE_STAGE_SCHEDULES + V_SCHEDULES and (per_rank < 2 or style != "loop"):
        others = "GPipe or 1F1B" if per_rank == 1 else "ZBVZeroBubble or DualPipeV"
        problem = f"requires at least 2 stages per rank in style loop, found {per_rank} in style {style}"
        hint = f"use the layout pp={num_ranks},vpp={max(2, per_rank)}, or the schedule {others}"
    else:
        return
    raise UsageError(_WHERE, f"{schedule} {problem}", hint, code="schedule.other-placement")


def _check_rounds(schedule: ScheduleName, num_ranks: int, num_microbatches: int) -> None:
    def even(number: int) -> bool:
        return number % default_group(num_ranks, number) == 0

    if not even(num_microbatches):
        num_rounds = num_microbatches // num_ranks
        lower = next(filter(even, range(num_microbatches - 1, 0, -1)))
        upper = next(filter(even, count(num_microbatches + 1)))
        raise UsageError(
            _WHERE,
            f"{schedule} on {num_ranks} ranks requires a multiple of {num_rounds} microbatches (rounds of equal "
            f"size), found {num_microbatches}",
            f"use {lower} or {upper} microbatches, or {_GROUP}"
            if schedule == "Interleaved1F1B" and num_microbatches >= num_ranks
            else f"use {lower} or {upper} microbatches",
            code="schedule.uneven-rounds",
        )


def _check_group(schedule: ScheduleName, num_ranks: int, num_microbatches: int, group: int) -> None:
    if schedule != "Interleaved1F1B":
        problem = f"is not supported by {schedule}"
        hint = "remove it, or use Interleaved1F1B"
        raise UsageError(_GROUP, problem, hint, code="schedule.microbatch-group")
    if num_microbatches < num_ranks:
        raise UsageError(
            _GROUP,
            f"microbatch groups require at least {num_ranks} microbatches (ranks), found {num_microbatches}",
            f"use {num_ranks} microbatches or more",
            code="schedule.too-few-microbatches",
        )

    def fits(size: int) -> bool:
        return num_ranks <= size <= num_microbatches and not 0 < num_microbatches % size < num_ranks

    if not fits(group):
        sizes = sorted(filter(fits, range(num_ranks, num_microbatches + 1)), key=lambda size: abs(size - group))
        raise UsageError(
            _GROUP,
            f"expected a microbatch group size from {num_ranks} (ranks) to {num_microbatches} (microbatches), with no "
            f"last group smaller than {num_ranks}, found {group}",
            "use a group size of " + " or ".join(map(str, sorted(sizes[:2]))),
            code="schedule.microbatch-group",
        )
