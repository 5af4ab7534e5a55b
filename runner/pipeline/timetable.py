"""The schedule of a pipeline and its table of actions, chosen and checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manifests.errors import ScheduleError, UsageError
from manifests.placement import Placement
from manifests.schedules import (
    Action,
    LoweredTable,
    Table,
    actions_of,
    check_schedule,
    compute_part,
    default_schedule,
    lower,
    read_csv,
    schedule_named,
    schedule_table,
)
from manifests.schema import Manifest

_SUFFIX = ".csv"
_SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timetable:
    """A named schedule, or a table of actions from a file, for the ranks of a pipeline.

    A single rank runs its microbatches in turn, whatever the schedule.
    """

    name: str  # the schedule's, or the file's
    placement: Placement
    file: LoweredTable | None = None

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed separately from input gradients (zero bubble)."""
        if self.placement.num_ranks == 1:
            return False
        if self.file is None:
            return self.name in _SPLIT
        return any(action.kind in "IW" for steps in self.file.ranks for step in steps for action in actions_of(step))

    def check(self, num_microbatches: int) -> None:
        """Check that a step can have this number of microbatches.

        Raises:
            UsageError: too few, a number that the schedule does not support, or not the file's.
        """
        if self.file is not None and self.file.num_microbatches != num_microbatches:
            raise UsageError(
                "--schedule",
                f"{self.name} expects {self.file.num_microbatches} microbatches, found {num_microbatches}",
                f"set --global-batch to {self.file.num_microbatches} times --microbatch",
                code="schedule.microbatches",
            )
        if self.file is None and self.placement.num_ranks > 1:
            check_schedule(self.name, self.placement, num_microbatches)

    def training(self, num_microbatches: int) -> LoweredTable:
        """Return the actions of a training step.

        Raises:
            UsageError: see `check`.
        """
        self.check(num_microbatches)
        return self.file or lower(schedule_table(self.name, self.placement, num_microbatches))

    def planned(self, num_microbatches: int) -> Table:
        """Return what every rank computes in a training step; a single rank runs one microbatch after the other.

        Raises:
            UsageError: see `check`.
        """
        if self.placement.num_ranks > 1:
            return compute_part(self.training(num_microbatches))
        stages, steps = range(self.placement.num_stages), list[Action]()
        for microbatch in range(num_microbatches):
            steps += (Action(stage=stage, kind="F", microbatch=microbatch) for stage in stages)
            steps += (Action(stage=stage, kind="B", microbatch=microbatch) for stage in reversed(stages))
        return Table(placement=self.placement, num_microbatches=num_microbatches, ranks=(tuple(steps),))

    def forward(self, num_microbatches: int) -> LoweredTable:
        """Return the actions of an evaluation: only forwards, each stage's microbatches one after the other.

        They do not depend on the schedule, so any number of microbatches can be evaluated.
        """
        ranks = tuple(
            tuple(
                Action(stage=stage, kind="F", microbatch=microbatch)
                for stage in self.placement.stages_on(rank)
                for microbatch in range(num_microbatches)
            )
            for rank in range(self.placement.num_ranks)
        )
        return lower(Table(placement=self.placement, num_microbatches=num_microbatches, ranks=ranks))


def choose_timetable(name: str | None, manifest: Manifest, num_microbatches: int) -> Timetable:
    """Return the timetable of --schedule, else the manifest's, else the default one for its stages.

    Raises:
        UsageError, ScheduleError: see `find_timetable`.
    """
    placement = manifest.placement
    name = name or manifest.layout.schedule or default_schedule(placement)
    return find_timetable(name, placement, num_microbatches)


def find_timetable(name: str, placement: Placement, num_microbatches: int) -> Timetable:
    """Return the timetable of a schedule's name, or of a .csv file.

    Raises:
        UsageError: an unknown schedule, or one that does not support these stages or this number of microbatches.
        ScheduleError: a file that cannot be read or run.
    """
    timetable = (
        read_timetable(Path(name), placement)
        if name.endswith(_SUFFIX)
        else Timetable(name=schedule_named(name), placement=placement)
    )
    timetable.check(num_microbatches)
    return timetable


def read_timetable(path: Path, placement: Placement) -> Timetable:
    """Read a table written by `manifests.schedules.write_csv` or torch, with or without sends and receives.

    Raises:
        ScheduleError: it cannot be read, is not for these stages, deadlocks, or would compute wrong gradients.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "check the path for typos" if isinstance(error, FileNotFoundError) else ""
        raise ScheduleError(
            str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}", hint, code="schedule.unreadable"
        ) from error
    table = lower(read_csv(text, str(path), placement))  # see Note [Waiting for sends] in torch_runtime.py
    _check_last_stage(table, str(path))
    return Timetable(name=path.name, placement=placement, file=table)


def _check_last_stage(table: LoweredTable, where: str) -> None:
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
