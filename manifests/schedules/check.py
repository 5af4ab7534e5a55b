"""Validation of schedule tables from files. Every violation is reported, not only the first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest

from manifests.errors import ScheduleError
from manifests.placement import Placement
from manifests.schedules.actions import LoweredStep, LoweredTable, Table, Transfer, Upkeep, actions_of
from manifests.schedules.order import Result, in_order, input_of, result_of

_MOST_SHOWN = 8


def check_table(table: Table | LoweredTable, where: str) -> None:
    """Check that every stage computes every microbatch once, on its rank, in an order without deadlock.

    Raises:
        ScheduleError: listing the violations.
    """
    _raise_all(_misplaced(table), where, code="schedule.misplaced-stages")
    _raise_all(_uncovered(table), where, code="schedule.wrong-actions")
    try:
        for _ in in_order(table.ranks, table.placement):
            pass
    except ScheduleError as error:
        raise error.changed(where=where) from None


def check_lowered(lowered: LoweredTable, where: str) -> None:
    """Check as `check_table`, and that tensors are sent, received and reduced correctly.

    See Note [Order of transfers] in lowering.py.

    Raises:
        ScheduleError: listing the violations.
    """
    check_table(lowered, where)
    _raise_all(_unreduced(lowered), where, code="schedule.gradients-not-reduced")
    _raise_all(_mistransferred(lowered), where, code="schedule.mismatched-transfers")


def stages_in(steps: Sequence[LoweredStep]) -> list[int]:
    """Return the stages in one rank's steps, in ascending order."""
    named = {action.stage for step in steps for action in actions_of(step)}
    return sorted(named | {step.stage for step in steps if isinstance(step, Transfer | Upkeep)})


def _raise_all(problems: Iterator[str], where: str, *, code: str) -> None:
    found = list(islice(problems, _MOST_SHOWN + 1))
    if len(found) > _MOST_SHOWN:
        found[_MOST_SHOWN:] = ["and more"]
    if found:
        raise ScheduleError(where, "; ".join(found), code=code)


def _misplaced(table: Table | LoweredTable) -> Iterator[str]:
    num_ranks = table.placement.num_ranks
    if len(table.ranks) != num_ranks:
        yield f"expected {num_ranks} rows, one per rank, found {len(table.ranks)}"
        return
    for rank, steps in enumerate(table.ranks):
        for stage in stages_in(steps):
            if stage >= table.placement.num_stages:
                yield f"rank {rank}: expected stages below {table.placement.num_stages}, found {stage}"
            elif table.placement.rank_of(stage) != rank:
                yield f"stage {stage}: expected on rank {table.placement.rank_of(stage)}, found on rank {rank}"


def _uncovered(table: Table | LoweredTable) -> Iterator[str]:
    counts = Counter[tuple[int, int, str]](
        (action.stage, action.microbatch, action.kind)
        for steps in table.ranks
        for step in steps
        for action in actions_of(step)
    )
    # Numbers in the file may be huge: this stops after reporting a few missing actions.
    for stage in range(table.placement.num_stages):
        for microbatch in range(table.num_microbatches):
            forwards, *backwards = (counts[stage, microbatch, kind] for kind in "FBIW")
            if not forwards and not any(backwards):
                yield f"stage {stage} never computes microbatch {microbatch}"
                continue
            if forwards != 1:
                yield f"{stage}F{microbatch} occurs {forwards} times"
            if backwards not in ([1, 0, 0], [0, 1, 1]):
                found = ", ".join(f"{number} {kind}" for number, kind in zip(backwards, "BIW", strict=True))
                yield f"stage {stage}, microbatch {microbatch}: expected 1 B, or 1 I and 1 W, found {found}"


def _unreduced(lowered: LoweredTable) -> Iterator[str]:
    for rank, steps in enumerate(lowered.ranks):
        reduced = Counter[int]()
        for step in steps:
            if isinstance(step, Upkeep) and step.kind == "REDUCE_GRAD":
                reduced[step.stage] += 1
            for action in actions_of(step):
                if action.kind != "F" and reduced[action.stage]:
                    yield f"rank {rank} reduces stage {action.stage} before {action}"
        for stage in lowered.placement.stages_on(rank):
            if reduced[stage] != 1:
                yield f"{stage}REDUCE_GRAD occurs {reduced[stage]} times"


def _mistransferred(lowered: LoweredTable) -> Iterator[str]:
    placement = lowered.placement
    sent, received = defaultdict[tuple[int, int], list[Result]](list), defaultdict[tuple[int, int], list[Result]](list)
    for rank, steps in enumerate(lowered.ranks):
        computed, arrived = set[Result](), set[Result]()
        for step in steps:
            if isinstance(step, Transfer):
                result, peer = _passed(step, placement)
                if peer is None or peer == rank:
                    yield f"{step}: the other stage is on the same rank or does not exist"
                elif step.kind.startswith("RECV"):
                    if result in arrived:
                        yield f"rank {rank}: duplicate {step}"
                    received[peer, rank].append(result)
                    arrived.add(result)
                else:
                    sent[rank, peer].append(result)
                    if result not in computed:
                        yield f"rank {rank}: {step} before its result is computed"
            for action in actions_of(step):
                needed = input_of(action, placement.num_stages)
                if needed is not None and placement.rank_of(needed[0]) != rank and needed not in arrived:
                    yield f"rank {rank}: {action} before its input is received"
                computed.add(result_of(action))
    for source, target in sorted(sent.keys() | received.keys()):
        for leaves, enters in zip_longest(sent[source, target], received[source, target]):
            if leaves != enters:
                yield f"rank {source} sends {_shown(leaves)} to rank {target}, which expects {_shown(enters)}"
                break


def _passed(transfer: Transfer, placement: Placement) -> tuple[Result, int | None]:
    """Return the result that a transfer sends or receives, and the other rank if that stage exists."""
    forward = transfer.kind.endswith("F")
    receives = transfer.kind.startswith("RECV")
    other = transfer.stage + (1 if forward != receives else -1)
    producer = other if receives else transfer.stage
    peer = placement.rank_of(other) if 0 <= other < placement.num_stages else None
    return (producer, "F" if forward else "B", transfer.microbatch), peer


def _shown(result: Result | None) -> str:
    return "nothing" if result is None else "{}SEND_{}{}".format(*result)
