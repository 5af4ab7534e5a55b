"""Tables as the CSV text that torch's schedule runtime loads (`_PipelineScheduleRuntime._load_csv`).

One row a rank, one cell a step: `2F0` is stage 2's forward of microbatch 0, `(2F4;5B1)OVERLAP_F_B` two
actions that may run as one. The format `compute_only` has nothing else; `compute_comms` has the
transfers (`2SEND_F0`) and the upkeep (`2REDUCE_GRAD`) too, and in torch 2.15 the waits for them. All these follow from
the compute actions (`lower`), so these cells are dropped where a table is read, as empty ones are.

A table that is read is checked: each action once, no deadlock.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import cast

from manifests.errors import Parameter, ScheduleError, UsageError, refused_by_system
from manifests.placement import Placement
from manifests.schedules.actions import (
    Action,
    ComputeKind,
    LoweredTable,
    Overlap,
    Step,
    Table,
    actions_of,
)
from manifests.schedules.order import in_order

_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})", re.ASCII)
_DERIVED = re.compile(
    r"\d{1,6}(?:(?:WAIT_)?SEND_[FB]\d{1,6}|RECV_[FB]\d{1,6}|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)", re.ASCII
)
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def write_csv(table: Table | LoweredTable) -> str:
    """Return the CSV text of a table: `compute_only` for a Table, `compute_comms` for a LoweredTable."""
    return "".join(",".join(map(str, steps)) + "\n" for steps in table.ranks)


def read_csv(text: str, where: str, placement: Placement) -> Table:
    """Read and check a table in either format; empty cells, which mark idle time in torch, are dropped."""
    ranks = _read_rows(text, where)
    table = Table(placement=placement, num_microbatches=_count_microbatches(ranks), ranks=ranks)
    check_table(table, where)
    return table


def is_schedule_file(schedule: str) -> bool:
    """Return whether a schedule is a file of actions, and not a name."""
    return schedule.endswith(".csv")


def read_schedule_file(path: Path, placement: Placement, *, microbatch_group: int | None = None) -> Table:
    """Read a table written by `write_csv` or torch, with or without sends and receives."""
    if microbatch_group is not None:
        where = Parameter("assumed.microbatch_group")
        problem = f"conflicts with {Parameter('assumed.schedule', str(path))}, whose order of actions is its own"
        raise UsageError(where, problem, "remove one of them", code="schedule.microbatch-group")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "check the path for typos" if isinstance(error, FileNotFoundError) else ""
        raise refused_by_system(str(path), error, hint=hint, code="schedule.unreadable") from error
    except UnicodeDecodeError as error:
        raise ScheduleError(str(path), f"cannot be read: {error}", code="schedule.unreadable") from error
    table = read_csv(text, str(path), placement)
    _check_last_stage(table, str(path))
    return table


def _check_last_stage(table: Table, where: str) -> None:
    """Refuse tables for which torch 2.13 silently computes wrong gradients: it numbers losses in order of execution.

    Source: `_maybe_compute_loss` and `_maybe_get_loss` in torch/distributed/pipelining/schedules.py.
    """
    last = table.placement.num_stages - 1
    steps = table.ranks[table.placement.rank_of(last)]
    order = [
        action.microbatch for step in steps for action in actions_of(step) if (action.stage, action.kind) == (last, "F")
    ]
    if order != sorted(order):
        shown = ", ".join(map(str, order[:8]))
        raise ScheduleError(
            where,
            f"the last stage, {last}, runs microbatches in the order {shown}",
            "number microbatches in the order in which the last stage runs them: torch matches losses by that",
            code="schedule.microbatch-order",
        )


def _read_rows(text: str, where: str) -> tuple[tuple[Step, ...], ...]:
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(where, f"invalid CSV: {error}", code="schedule.not-csv") from error
    ranks = tuple(
        tuple(
            _read_step(cell.strip(), f"{where}: row {row_number}, cell {cell_number}")
            for cell_number, cell in enumerate(row, start=1)
            if cell.strip() and not _DERIVED.fullmatch(cell.strip())
        )
        for row_number, row in enumerate(rows, start=1)
    )
    for row_number, steps in enumerate(ranks, start=1):
        if not steps:
            place, hint = f"{where}: row {row_number}", "write one row per rank"
            raise ScheduleError(place, "expected compute actions, found none", hint, code="schedule.idle-rank")
    if not ranks:
        problem = "expected one row of actions per rank, found an empty file"
        raise ScheduleError(where, problem, code="schedule.idle-rank")
    return ranks


def _read_step(cell: str, where: str) -> Step:
    if action := _read_action(cell):
        return action
    if match := _OVERLAP.fullmatch(cell):
        forward, backward = map(_read_action, match.groups())
        if forward and backward and (forward.kind, backward.kind) == ("F", "B"):
            return Overlap(forward=forward, backward=backward)
    hint = "write for example 2F0, 2B0, 2I0, 2W0 or (2F4;5B1)OVERLAP_F_B"
    raise ScheduleError(where, f"{cell[:40]!r} is not an action", hint, code="schedule.invalid-action")


def _read_action(text: str) -> Action | None:
    match = _ACTION.fullmatch(text.strip())
    return match and Action(stage=int(match[1]), kind=cast(ComputeKind, match[2]), microbatch=int(match[3]))


def _count_microbatches(ranks: Sequence[Sequence[Step]]) -> int:
    return 1 + max(action.microbatch for steps in ranks for step in steps for action in actions_of(step))


_MOST_SHOWN = 8


def check_table(table: Table, where: str) -> None:
    """Check that every stage computes every microbatch once, on its rank, in an order without deadlock."""
    _raise_all(_misplaced(table), where, code="schedule.misplaced-stages")
    _raise_all(_uncovered(table), where, code="schedule.wrong-actions")
    try:
        for _ in in_order(table.ranks, table.placement):
            pass
    except ScheduleError as error:
        raise error.changed(where=where) from None


def _stages_in(steps: Sequence[Step]) -> list[int]:
    """Return the stages in one rank's steps, in ascending order."""
    return sorted({action.stage for step in steps for action in actions_of(step)})


def _raise_all(problems: Iterator[str], where: str, *, code: str) -> None:
    sentences = list(islice(problems, _MOST_SHOWN + 1))
    if len(sentences) > _MOST_SHOWN:
        sentences[_MOST_SHOWN:] = ["and more"]
    if sentences:
        raise ScheduleError(where, "; ".join(sentences), code=code)


def _misplaced(table: Table) -> Iterator[str]:
    num_ranks = table.placement.num_ranks
    if len(table.ranks) != num_ranks:
        yield f"expected {num_ranks} rows, one per rank, found {len(table.ranks)}"
        return
    for rank, steps in enumerate(table.ranks):
        for stage in _stages_in(steps):
            if stage >= table.placement.num_stages:
                yield f"rank {rank}: expected stages below {table.placement.num_stages}, found {stage}"
            elif table.placement.rank_of(stage) != rank:
                yield f"stage {stage}: expected on rank {table.placement.rank_of(stage)}, found on rank {rank}"


def _uncovered(table: Table) -> Iterator[str]:
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
