"""Fail together: what is wrong on one rank ends all ranks, with the same message everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from manifests.errors import RankError, UserError
from runner.distributed.system_errors import exhausted, unreachable
from runner.rundir.exit_report import code_of
from runner.rundir.rank_label import rank_label

__all__ = ["AloneError", "alone", "from_rank_0", "join_failures", "together"]

T = TypeVar("T")


class AloneError(UserError):
    """What one rank met while the others went on: it says so itself, and its end ends them."""


class _BugError(UserError):
    """What is our bug on another rank, which keeps the traceback."""

    exit_code = 1


@contextmanager
def together(task: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank of a group; when any rank's block raised, raise on all of them.

    The block may run no collectives of its own. The message names each rank that failed, once; what no restart
    mends comes first.

    Raises:
        UserError: what the first failing rank met, with a line for each of the others.
    """
    failure: UserError | None = None
    unexpected: BaseException | None = None
    try:
        yield
    except UserError as error:
        failure = error
    except Exception as error:
        failure = exhausted(error) or unreachable(error)
        if failure is None:  # our bug: the other ranks must end too, this one keeps its traceback
            unexpected = error
            failure = _BugError(task, f"{type(error).__name__}: {error}", code="rank.internal-error")
    failures: list[tuple[str, UserError | None]] = [("", None)] * dist.get_world_size(group)
    dist.all_gather_object(failures, (rank_label(dist.get_rank()), failure), group=group)
    if unexpected is not None:
        raise unexpected
    failed = {place: error for place, error in failures if error is not None}
    if failed:
        joined = join_failures(failed)
        joined.is_elsewhere = failure is None or failure.is_elsewhere
        raise joined


def join_failures(failed: Mapping[str, UserError]) -> UserError:
    """Give one error for what ranks met, each at its place; what no restart mends comes first, and gives the code."""
    (place, first), *others = sorted(failed.items(), key=lambda item: code_of(item[1]) == RankError.exit_code)
    said = first.on_rank(place)
    # What ranks of a group have agreed on already is the same on all of them.
    rest = [error.on_rank(place) for place, error in others if str(error) != str(first)]
    return said.changed(problem=said.problem + "".join(f"\n{each.where}: {each.problem}" for each in rest))


def from_rank_0(value: T) -> T:
    """Give rank 0's value, on every rank; each of them calls this."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


@contextmanager
def alone(rank: int) -> Iterator[None]:
    """Run a block where a gather at every turn would cost too much; its errors name the rank."""
    try:
        yield
    except UserError as error:
        placed = error.on_rank(rank_label(rank))
        met = AloneError(placed.where, error.problem, error.hint, code=error.code)
        met.exit_code, met.is_elsewhere, met.is_placed = code_of(error), error.is_elsewhere, True
        raise met from error
