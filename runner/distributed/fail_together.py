"""Fail together: an error on one rank ends all ranks, with one message that names the rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from manifests.errors import RankError, UserError
from runner.distributed.system_errors import exhausted, unreachable
from runner.rundir.exit_report import code_of
from runner.rundir.rank_label import rank_label

T = TypeVar("T")


class AloneError(UserError):
    """An error of one rank while the others continue: it reports the error itself, and its exit ends them."""


class _BugError(UserError):
    """A bug on another rank, which prints the traceback."""

    exit_code = 1


@contextmanager
def together(task: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank of a group; if it raises on any rank, raise on all of them.

    The block must not run collectives. The message names each failed rank once; errors that a restart cannot fix
    come first.

    Raises:
        UserError: the error of the first failing rank, with a line for each of the others.
    """
    failure: UserError | None = None
    unexpected: BaseException | None = None
    try:
        yield
    except UserError as error:
        failure = error
    except Exception as error:
        failure = exhausted(error) or unreachable(error)
        if failure is None:  # a bug: the other ranks must end too, this one prints its traceback
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
    """Join the errors of ranks, by their labels, into one; an error that a restart cannot fix comes first."""
    (place, first), *others = sorted(failed.items(), key=lambda item: code_of(item[1]) == RankError.exit_code)
    said = first.on_rank(place)
    # An error that a group of ranks has already joined is the same on all of them.
    rest = [error.on_rank(place) for place, error in others if str(error) != str(first)]
    return said.changed(problem="\n".join((said.problem, *(str(each.changed(hint="")) for each in rest))))


def from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank; every rank calls this."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


@contextmanager
def alone(rank: int) -> Iterator[None]:
    """Run a block without collectives, where `together` would cost too much; its errors name the rank."""
    try:
        yield
    except UserError as error:
        placed = error.on_rank(rank_label(rank))
        met = AloneError(placed.where, error.problem, error.hint, code=error.code)
        met.exit_code, met.is_elsewhere, met.is_placed = code_of(error), error.is_elsewhere, True
        raise met from error
