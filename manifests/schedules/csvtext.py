"""Tables as the CSV text that torch's schedule runtime loads (`_PipelineScheduleRuntime._load_csv`).

One row a rank, one cell a step: `2F0` is stage 2's forward of microbatch 0, `(2F4;5B1)OVERLAP_F_B` two
actions that may run as one. The format `compute_only` has nothing else; `compute_comms` has the
transfers (`2SEND_F0`) and the upkeep (`2REDUCE_GRAD`) too. torch 2.15 also writes when a send or a reduction is waited
for (`2WAIT_SEND_F0`); the runtime decides that, so these cells are dropped, as empty ones are.

A table that is read is checked: each action once, gradients reduced, transfers in pairs, no deadlock.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import TypeVar, cast

from manifests.errors import ScheduleError
from manifests.placement import Placement
from manifests.schedules.actions import (
    Action,
    ComputeKind,
    LoweredStep,
    LoweredTable,
    Overlap,
    Step,
    Table,
    Transfer,
    TransferKind,
    Upkeep,
    UpkeepKind,
    actions_of,
)
from manifests.schedules.order import Result, in_order, input_of, result_of

StepT = TypeVar("StepT", bound=LoweredStep)
_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})", re.ASCII)
_TRANSFER = re.compile(r"(\d{1,6})(SEND_F|RECV_F|SEND_B|RECV_B)(\d{1,6})", re.ASCII)
_UPKEEP = re.compile(r"(\d{1,6})(UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
_WAIT = re.compile(r"\d{1,6}WAIT_(SEND_[FB]\d{1,6}|REDUCE_GRAD)", re.ASCII)
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def write_csv(table: Table | LoweredTable) -> str:
    """Return the CSV text of a table: `compute_only` for a Table, `compute_comms` for a LoweredTable."""
    return "".join(",".join(map(str, steps)) + "\n" for steps in table.ranks)


def read_csv(text: str, where: str, placement: Placement | None = None) -> Table:
    """Read and check a table in the format `compute_only`.

    Without a placement, stages must be assigned to ranks in a loop or in a v. Empty cells, which mark idle time in
    torch, are dropped.

    Raises:
        ScheduleError: a cell is not a compute action; a stage is on the wrong rank; a microbatch is computed twice
            or not at all; the ranks would deadlock.
    """
    ranks = _read_rows(text, where, _read_step)
    table = Table(
        placement=placement or _placement_of(ranks, where), num_microbatches=_count_microbatches(ranks), ranks=ranks
    )
    check_table(table, where)
    return table


def read_lowered_csv(text: str, where: str, placement: Placement | None = None) -> LoweredTable:
    """Read and check a table in the format `compute_comms`.

    Raises:
        ScheduleError: as `read_csv`; or a tensor is not sent, not received, or received in another order than sent;
            or gradients are not reduced once at the end.
    """
    ranks = _read_rows(text, where, _read_lowered_step)
    table = LoweredTable(
        placement=placement or _placement_of(ranks, where), num_microbatches=_count_microbatches(ranks), ranks=ranks
    )
    check_lowered(table, where)
    return table


def _read_rows(text: str, where: str, read: Callable[[str, str], StepT]) -> tuple[tuple[StepT, ...], ...]:
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(where, f"invalid CSV: {error}", code="schedule.not-csv") from error
    ranks = tuple(
        tuple(
            read(cell.strip(), f"{where}: row {row_number}, cell {cell_number}")
            for cell_number, cell in enumerate(row, start=1)
            if cell.strip() and not _WAIT.fullmatch(cell.strip())
        )
        for row_number, row in enumerate(rows, start=1)
    )
    for row_number, steps in enumerate(ranks, start=1):
        if not any(actions_of(step) for step in steps):
            place, hint = f"{where}: row {row_number}", "write one row per rank"
            raise ScheduleError(place, "expected compute actions, found none", hint, code="schedule.idle-rank")
    if not ranks:
        problem = "expected one row of actions per rank, found an empty file"
        raise ScheduleError(where, problem, code="schedule.idle-rank")
    return ranks


def _read_step(cell: str, where: str) -> Step:
    step = _read_lowered_step(cell, where)
    if isinstance(step, Transfer | Upkeep):
        hint = "expected the format compute_only; this file is in the format compute_comms"
        raise ScheduleError(where, f"{cell!r} is not a compute action", hint, code="schedule.invalid-action")
    return step


def _read_lowered_step(cell: str, where: str) -> LoweredStep:
    if action := _read_action(cell):
        return action
    if match := _TRANSFER.fullmatch(cell):
        return Transfer(stage=int(match[1]), kind=cast(TransferKind, match[2]), microbatch=int(match[3]))
    if match := _UPKEEP.fullmatch(cell):
        return Upkeep(stage=int(match[1]), kind=cast(UpkeepKind, match[2]))
    if match := _OVERLAP.fullmatch(cell):
        forward, backward = map(_read_action, match.groups())
        if forward and backward and (forward.kind, backward.kind) == ("F", "B"):
            return Overlap(forward=forward, backward=backward)
    hint = "write for example 2F0, 2B0, 2I0, 2W0 or (2F4;5B1)OVERLAP_F_B"
    raise ScheduleError(where, f"{cell[:40]!r} is not an action", hint, code="schedule.invalid-action")


def _read_action(text: str) -> Action | None:
    match = _ACTION.fullmatch(text.strip())
    return match and Action(stage=int(match[1]), kind=cast(ComputeKind, match[2]), microbatch=int(match[3]))


def _count_microbatches(ranks: Sequence[Sequence[LoweredStep]]) -> int:
    return 1 + max(action.microbatch for steps in ranks for step in steps for action in actions_of(step))


def _placement_of(ranks: Sequence[Sequence[LoweredStep]], where: str) -> Placement:
    stages_by_rank = [stages_in(steps) for steps in ranks]
    num_stages, num_ranks = 1 + max(stages[-1] for stages in stages_by_rank), len(ranks)
    if num_stages % num_ranks:
        problem = f"expected a multiple of {num_ranks} stages (rows, one per rank), found {num_stages}"
        raise ScheduleError(where, problem, code="schedule.misplaced-stages")
    placements = [Placement(num_stages=num_stages, num_ranks=num_ranks)]
    if num_stages == 2 * num_ranks:
        placements.append(Placement(num_stages=num_stages, num_ranks=num_ranks, style="v"))
    for placement in placements:
        if all(placement.rank_of(stage) == rank for rank, stages in enumerate(stages_by_rank) for stage in stages):
            return placement
    shown = "; ".join(
        f"rank {rank} has {', '.join(map(str, stages[:4]))}" for rank, stages in enumerate(stages_by_rank[:4])
    )
    problem = f"expected stages assigned to ranks in a loop or in a v, found {shown}"
    raise ScheduleError(where, problem, code="schedule.misplaced-stages")


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
    sentences = list(islice(problems, _MOST_SHOWN + 1))
    if len(sentences) > _MOST_SHOWN:
        sentences[_MOST_SHOWN:] = ["and more"]
    if sentences:
        raise ScheduleError(where, "; ".join(sentences), code=code)


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
                shown = ", ".join(f"{number} {kind}" for number, kind in zip(backwards, "BIW", strict=True))
                yield f"stage {stage}, microbatch {microbatch}: expected 1 B, or 1 I and 1 W, found {shown}"


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
