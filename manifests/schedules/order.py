"""An order in which all ranks' steps can run, or an error that explains the deadlock."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TypeVar

from manifests.errors import ScheduleError
from manifests.placement import Placement
from manifests.schedules.actions import Action, LoweredStep, actions_of

# Stage, kind and microbatch of a finished action; I counts as B, since it gives the previous stage the same gradient.
Result = tuple[int, str, int]
StepT = TypeVar("StepT", bound=LoweredStep)


def in_order(ranks: Sequence[Sequence[StepT]], placement: Placement) -> Iterator[tuple[int, StepT]]:
    """Yield every (rank, step) after the steps it depends on, one ready step of each rank in turn."""
    num_stages, done = placement.num_stages, set[Result]()
    at = [0] * len(ranks)
    while unfinished := [rank for rank, steps in enumerate(ranks) if at[rank] < len(steps)]:
        progress = False
        for rank in unfinished:
            step = ranks[rank][at[rank]]
            actions = actions_of(step)
            if _missing(actions, num_stages, done) is None:
                at[rank] += 1
                progress = True
                done.update(map(result_of, actions))
                yield rank, step
        if not progress:
            check_finished(ranks, at, placement, done)


def check_finished(
    ranks: Sequence[Sequence[LoweredStep]], at: Sequence[int], placement: Placement, done: Container[Result]
) -> None:
    """Check that ranks that cannot continue, each at its position, have no steps left."""
    remaining = [steps[position:] for steps, position in zip(ranks, at, strict=True)]
    if any(remaining):
        raise _deadlock(remaining, placement.num_stages, done)


def input_of(action: Action, num_stages: int) -> Result | None:
    """Return the result of an adjacent stage that is the input of an action, if any."""
    stage, kind = action.stage, action.kind
    if kind == "F":
        return (stage - 1, "F", action.microbatch) if stage else None
    return (stage + 1, "B", action.microbatch) if kind != "W" and stage < num_stages - 1 else None


def inputs_of(action: Action, num_stages: int) -> list[Result]:
    """Return all results that an action needs, those of its own stage included."""
    kinds = {"F": (), "W": ("B",)}.get(action.kind, ("F",))  # of the same stage
    neighbor = input_of(action, num_stages)
    return [(action.stage, kind, action.microbatch) for kind in kinds] + ([neighbor] if neighbor else [])


def result_of(action: Action) -> Result:
    return action.stage, "B" if action.kind == "I" else action.kind, action.microbatch


def _missing(actions: Sequence[Action], num_stages: int, done: Container[Result]) -> Result | None:
    """Return a result that the actions of a step still wait for, if any."""
    return next((needed for action in actions for needed in inputs_of(action, num_stages) if needed not in done), None)


def _deadlock(remaining: Sequence[Sequence[LoweredStep]], num_stages: int, done: Container[Result]) -> ScheduleError:
    """Follow the dependencies from rank to rank to a cycle, or to something that no rank computes."""
    computed_by = {
        result_of(action): rank for rank, steps in enumerate(remaining) for step in steps for action in actions_of(step)
    }
    waits: dict[int, str] = {}
    rank = next(rank for rank, steps in enumerate(remaining) if steps)
    while rank not in waits:
        missing = _missing(actions_of(remaining[rank][0]), num_stages, done)
        assert missing is not None, "a rank that waits for nothing could run"
        stage, kind, microbatch = missing
        waits[rank] = f"rank {rank} waits with {remaining[rank][0]} for {stage}{kind}{microbatch}"
        if missing not in computed_by:
            return ScheduleError("schedule", f"{waits[rank]}, which no rank computes", code="schedule.deadlock")
        if computed_by[missing] == rank:
            return ScheduleError("schedule", f"{waits[rank]}, which it computes later", code="schedule.deadlock")
        rank = computed_by[missing]
    cycle = list(waits)[list(waits).index(rank) :]
    problem = "deadlock: " + "; ".join(waits[rank] for rank in cycle)
    return ScheduleError("schedule", problem, code="schedule.deadlock")
