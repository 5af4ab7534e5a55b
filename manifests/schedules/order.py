"""An order in which all ranks' steps can run, or the sentence that says why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from manifests.errors import InputError, ScheduleError
from manifests.placement import Placement
from manifests.schedules.actions import Action, LoweredStep, actions_of

__all__ = ["Result", "in_order", "input_of", "result_of"]

# Stage, kind and microbatch of a finished action; I counts as B, which gives the stage before the same.
Result = tuple[int, str, int]
StepT = TypeVar("StepT", bound=LoweredStep)


def in_order(ranks: Sequence[Sequence[StepT]], placement: Placement) -> Iterator[tuple[int, StepT]]:
    """Yield every (rank, step), each after the steps it waits for.

    Visits the ranks in turn, taking one step of each that is ready.

    Raises:
        InputError: ranks that wait for each other, or for what no rank computes.
    """
    num_stages, done = placement.num_stages, set[Result]()
    at = [0] * len(ranks)
    while unfinished := [rank for rank, steps in enumerate(ranks) if at[rank] < len(steps)]:
        progress = False
        for rank in unfinished:
            step = ranks[rank][at[rank]]
            if _missing(step, num_stages, done) is None:
                at[rank] += 1
                progress = True
                done.update(result_of(action) for action in actions_of(step))
                yield rank, step
        if not progress:
            left = [steps[position:] for steps, position in zip(ranks, at, strict=True)]
            raise _deadlock(left, num_stages, done)


def input_of(action: Action, num_stages: int) -> Result | None:
    """Return the result of a neighbouring stage that an action works on, if any."""
    if action.kind == "F" and action.stage > 0:
        return action.stage - 1, "F", action.microbatch
    if action.kind in "BI" and action.stage < num_stages - 1:
        return action.stage + 1, "B", action.microbatch
    return None


def result_of(action: Action) -> Result:
    return action.stage, "B" if action.kind == "I" else action.kind, action.microbatch


def _missing(step: LoweredStep, num_stages: int, done: set[Result]) -> Result | None:
    """Return what a step still waits for, if anything."""
    for action in actions_of(step):
        if action.kind != "F":
            own = (action.stage, "B" if action.kind == "W" else "F", action.microbatch)
            if own not in done:
                return own
        neighbour = input_of(action, num_stages)
        if neighbour is not None and neighbour not in done:
            return neighbour
    return None


def _deadlock(left: Sequence[Sequence[LoweredStep]], num_stages: int, done: set[Result]) -> InputError:
    """Follow the waiting from rank to rank until it closes a cycle, or ends at what no rank computes."""
    holders = {
        result_of(action): rank for rank, steps in enumerate(left) for step in steps for action in actions_of(step)
    }
    waits: dict[int, str] = {}
    rank = next(rank for rank, steps in enumerate(left) if steps)
    while rank not in waits:
        missing = _missing(left[rank][0], num_stages, done)
        assert missing is not None, "a rank that waits for nothing is not stuck"
        stage, kind, microbatch = missing
        waits[rank] = f"rank {rank} cannot start {left[rank][0]} before {stage}{kind}{microbatch}"
        if missing not in holders:
            return ScheduleError("schedule", f"{waits[rank]}, which no rank computes", code="schedule.deadlock")
        if holders[missing] == rank:
            problem = f"{waits[rank]}, which is not earlier in its own list"
            return ScheduleError("schedule", problem, code="schedule.deadlock")
        rank = holders[missing]
    circle = list(waits)[list(waits).index(rank) :]
    problem = "the ranks wait for each other: " + "; ".join(waits[rank] for rank in circle)
    return ScheduleError("schedule", problem, code="schedule.deadlock")
