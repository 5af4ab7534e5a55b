"""Which schedules there are, and which stages and microbatches each of them can run."""

from __future__ import annotations

from difflib import get_close_matches
from itertools import count
from typing import Literal, get_args

from manifests.errors import UsageError
from manifests.placement import Placement

__all__ = ["SCHEDULES", "ScheduleName", "check_schedule", "default_group", "default_schedule", "schedule_named"]

ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
_SINGLE = ("GPipe", "1F1B")  # one stage on each rank
_V = ("ZBVZeroBubble", "DualPipeV")  # two on each rank, placed in a v
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
_WHERE = "--schedule"


def schedule_named(name: str) -> ScheduleName:
    """Return the schedule of that name, upper or lower case.

    Raises:
        UsageError: no schedule has that name.
    """
    known = {schedule.lower(): schedule for schedule in SCHEDULES}
    if name.lower() in known:
        return known[name.lower()]
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.3)
    guess = f"did you mean {known[close[0]]}? " if close else ""
    raise UsageError(_WHERE, f"{name!r} is not known", f"{guess}known: {', '.join(SCHEDULES)}", code="schedule.unknown")


def default_schedule(placement: Placement) -> ScheduleName:
    """Return the schedule for stages when none is asked for."""
    if placement.style == "v":
        return "ZBVZeroBubble"
    return "1F1B" if placement.num_virtual == 1 else "Interleaved1F1B"


def check_schedule(
    name: str, placement: Placement, num_microbatches: int, *, microbatch_group: int | None = None
) -> ScheduleName:
    """Return the schedule's own name, if these stages and this many microbatches can run on it.

    `microbatch_group` is Megatron's, see `schedule_table`.

    Raises:
        UsageError: an unknown schedule; stages per rank or a placement that it cannot run; too few
            microbatches, or a number of them that it cannot divide into rounds.
    """
    schedule = schedule_named(name)
    if num_microbatches < 1:
        problem = f"{schedule} needs at least 1 microbatch, found {num_microbatches}"
        raise UsageError(_WHERE, problem, code="schedule.too-few-microbatches")
    _check_placement(schedule, placement)
    if schedule in ("1F1B", "DualPipeV") and num_microbatches < placement.num_stages:
        other = "GPipe" if schedule == "1F1B" else "ZBVZeroBubble"
        raise UsageError(
            _WHERE,
            f"{schedule} needs at least {placement.num_stages} microbatches, one for each stage, "
            f"found {num_microbatches}",
            f"take {placement.num_stages} microbatches or more, or the schedule {other}",
            code="schedule.too-few-microbatches",
        )
    if microbatch_group is not None:
        _check_group(schedule, placement.num_ranks, num_microbatches, microbatch_group)
    elif schedule in _IN_ROUNDS:
        _check_rounds(schedule, placement.num_ranks, num_microbatches)
    return schedule


def default_group(num_ranks: int, num_microbatches: int) -> int:
    """Return how many microbatches go through a stage before the rank turns to its next one: torch's choice.

    As many rounds as there are whole sets of `num_ranks` microbatches, at least one.
    """
    return num_microbatches // max(1, num_microbatches // num_ranks)


def _check_placement(schedule: ScheduleName, placement: Placement) -> None:
    num_ranks, per_rank, style = placement.num_ranks, placement.num_virtual, placement.style
    if schedule in _SINGLE and per_rank != 1:
        other = "ZBVZeroBubble" if style == "v" else "Interleaved1F1B"
        raise UsageError(
            _WHERE,
            f"{schedule} needs 1 stage on each rank, found {per_rank}",
            f"take the schedule {other}, or the layout pp={num_ranks}",
            code="schedule.other-placement",
        )
    if schedule in _V and style != "v":
        others = "GPipe or 1F1B" if per_rank == 1 else "Interleaved1F1B or InterleavedZeroBubble"
        raise UsageError(
            _WHERE,
            f"{schedule} needs 2 stages on each rank, placed in a v, found {per_rank} placed in a loop",
            f"take the layout pp={num_ranks},vpp=2,style=v, or the schedule {others}",
            code="schedule.other-placement",
        )
    if schedule not in _SINGLE + _V and (per_rank < 2 or style != "loop"):
        others = "GPipe or 1F1B" if per_rank == 1 else "ZBVZeroBubble or DualPipeV"
        raise UsageError(
            _WHERE,
            f"{schedule} needs 2 stages or more on each rank, placed in a loop, found {per_rank} placed in a {style}",
            f"take the layout pp={num_ranks},vpp={max(2, per_rank)}, or the schedule {others}",
            code="schedule.other-placement",
        )


def _check_rounds(schedule: ScheduleName, num_ranks: int, num_microbatches: int) -> None:
    def even(number: int) -> bool:
        return number % default_group(num_ranks, number) == 0

    if not even(num_microbatches):
        num_rounds = num_microbatches // num_ranks
        lower = next(filter(even, range(num_microbatches - 1, 0, -1)))
        upper = next(filter(even, count(num_microbatches + 1)))
        raise UsageError(
            _WHERE,
            f"{schedule} over {num_ranks} ranks runs microbatches in {num_rounds} rounds of equal size, "
            f"found {num_microbatches} microbatches",
            f"take {lower} or {upper} microbatches",
            code="schedule.uneven-rounds",
        )


def _check_group(schedule: ScheduleName, num_ranks: int, num_microbatches: int, group: int) -> None:
    if schedule != "Interleaved1F1B":
        problem = f"{schedule} does not support groups of microbatches"
        hint = "leave the group out, or take Interleaved1F1B"
        raise UsageError(_WHERE, problem, hint, code="schedule.microbatch-group")
    if num_microbatches < num_ranks:
        raise UsageError(
            _WHERE,
            f"groups need at least {num_ranks} microbatches, one for each rank, found {num_microbatches}",
            f"take {num_ranks} microbatches or more",
            code="schedule.too-few-microbatches",
        )

    def fits(size: int) -> bool:
        return num_ranks <= size <= num_microbatches and not 0 < num_microbatches % size < num_ranks

    if not fits(group):
        sizes = sorted(filter(fits, range(num_ranks, num_microbatches + 1)), key=lambda size: abs(size - group))
        raise UsageError(
            _WHERE,
            f"a group of microbatches takes {num_ranks} (ranks) to {num_microbatches} (microbatches) and leaves none "
            f"or at least {num_ranks} for the last group, found {group}",
            "take a group of " + " or ".join(map(str, sorted(sizes[:2]))),
            code="schedule.microbatch-group",
        )
