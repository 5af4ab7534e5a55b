"""Tables as the CSV text that torch's schedule runtime loads (`_PipelineScheduleRuntime._load_csv`).

One row a rank, one cell a step: `2F0` is stage 2's forward of microbatch 0, `(2F4;5B1)OVERLAP_F_B` two
actions that may run as one. The format `compute_only` has nothing else; `compute_comms` has the
transfers (`2SEND_F0`) and the upkeep (`2REDUCE_GRAD`) too. torch 2.15 also writes when a send or a reduction is waited
for (`2WAIT_SEND_F0`); the runtime decides that, so these cells are dropped, as empty ones are.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
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
from manifests.schedules.check import check_lowered, check_table, stages_in

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
    if found := _TRANSFER.fullmatch(cell):
        return Transfer(stage=int(found[1]), kind=cast(TransferKind, found[2]), microbatch=int(found[3]))
    if found := _UPKEEP.fullmatch(cell):
        return Upkeep(stage=int(found[1]), kind=cast(UpkeepKind, found[2]))
    if found := _OVERLAP.fullmatch(cell):
        forward, backward = map(_read_action, found.groups())
        if forward and backward and (forward.kind, backward.kind) == ("F", "B"):
            return Overlap(forward=forward, backward=backward)
    hint = "write for example 2F0, 2B0, 2I0, 2W0 or (2F4;5B1)OVERLAP_F_B"
    raise ScheduleError(where, f"{cell[:40]!r} is not an action", hint, code="schedule.invalid-action")


def _read_action(text: str) -> Action | None:
    found = _ACTION.fullmatch(text.strip())
    return found and Action(stage=int(found[1]), kind=cast(ComputeKind, found[2]), microbatch=int(found[3]))


def _count_microbatches(ranks: Sequence[Sequence[LoweredStep]]) -> int:
    return 1 + max(action.microbatch for steps in ranks for step in steps for action in actions_of(step))


def _placement_of(ranks: Sequence[Sequence[LoweredStep]], where: str) -> Placement:
    stages = [stages_in(steps) for steps in ranks]
    num_stages, num_ranks = 1 + max(own[-1] for own in stages), len(ranks)
    if num_stages % num_ranks:
        problem = f"expected a multiple of {num_ranks} stages (rows, one per rank), found {num_stages}"
        raise ScheduleError(where, problem, code="schedule.misplaced-stages")
    placements = [Placement(num_stages=num_stages, num_ranks=num_ranks)]
    if num_stages == 2 * num_ranks:
        placements.append(Placement(num_stages=num_stages, num_ranks=num_ranks, style="v"))
    for placement in placements:
        if all(placement.rank_of(stage) == rank for rank, own in enumerate(stages) for stage in own):
            return placement
    shown = "; ".join(f"rank {rank} has {', '.join(map(str, own[:4]))}" for rank, own in enumerate(stages[:4]))
    problem = f"expected stages assigned to ranks in a loop or in a v, found {shown}"
    raise ScheduleError(where, problem, code="schedule.misplaced-stages")
