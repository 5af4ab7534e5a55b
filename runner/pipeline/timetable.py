"""The schedule of a pipeline and its table of actions, chosen and checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manifests.errors import UsageError
from manifests.placement import Placement
from manifests.schedules.actions import Action, LoweredTable, Table, actions_of
from manifests.schedules.csvtext import is_schedule_file, read_schedule_file
from manifests.schedules.lowering import compute_part, lower
from manifests.schedules.rules import check_schedule, schedule_named
from manifests.schedules.tables import schedule_table

_SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timetable:
    """A named schedule, or a table of actions from a file, for the ranks of a pipeline.

    A single rank runs its microbatches in turn, whatever the schedule.
    """

    name: str  # the schedule's, or the file's
    placement: Placement
    file: LoweredTable | None = None
    microbatch_group: int | None = None  # of Interleaved1F1B

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed separately from input gradients (zero bubble)."""
        if self.placement.num_ranks == 1:
            return False
        if self.file is None:
            return self.name in _SPLIT
        return any(action.kind in "IW" for steps in self.file.ranks for step in steps for action in actions_of(step))

    def check(self, num_microbatches: int) -> None:
        """Check that a step can have this number of microbatches."""
        if self.file is not None and self.file.num_microbatches != num_microbatches:
            raise UsageError(
                "--schedule",
                f"{self.name} expects {self.file.num_microbatches} microbatches, found {num_microbatches}",
                f"set --global-batch to {self.file.num_microbatches} x --microbatch x data-parallel replicas",
                code="schedule.microbatches",
            )
        if self.file is None and self.placement.num_ranks > 1:
            check_schedule(self.name, self.placement, num_microbatches, microbatch_group=self.microbatch_group)
        elif self.microbatch_group is not None:
            problem = "has no effect on a single pipeline rank, which runs one microbatch after the other"
            raise UsageError("--microbatch-group", problem, "remove it", code="schedule.microbatch-group")

    def training(self, num_microbatches: int) -> LoweredTable:
        """Return the actions of a training step."""
        self.check(num_microbatches)
        group = self.microbatch_group
        return self.file or lower(schedule_table(self.name, self.placement, num_microbatches, microbatch_group=group))

    def planned(self, num_microbatches: int) -> Table:
        """Return what every rank computes in a training step; a single rank runs one microbatch after the other."""
        if self.placement.num_ranks > 1:
            return compute_part(self.training(num_microbatches))
        stages, steps = range(self.placement.num_stages), list[Action]()
        for microbatch in range(num_microbatches):
            steps += (Action(stage=stage, kind="F", microbatch=microbatch) for stage in stages)
            steps += (Action(stage=stage, kind="B", microbatch=microbatch) for stage in reversed(stages))
        return Table(placement=self.placement, num_microbatches=num_microbatches, ranks=(tuple(steps),))

    def forward(self, num_microbatches: int) -> LoweredTable:
        """Return the actions of an evaluation: only forwards, each soon after its input is computed.

        They do not depend on the schedule, so any number of microbatches can be evaluated, in the memory of a few.
        """
        placement = self.placement
        group = 1 if placement.style == "v" else placement.num_ranks  # microbatches that enter in successive slots

        def slot(action: Action) -> int:
            """Return when an action runs, if all take one slot: one after the previous stage, no two on a rank."""
            stage, _, microbatch = action
            return placement.num_virtual * (microbatch - microbatch % group) + microbatch % group + stage

        ranks = tuple(
            tuple(
                sorted(
                    (
                        Action(stage=stage, kind="F", microbatch=microbatch)
                        for stage in placement.stages_on(rank)
                        for microbatch in range(num_microbatches)
                    ),
                    key=slot,
                )
            )
            for rank in range(placement.num_ranks)
        )
        return lower(Table(placement=placement, num_microbatches=num_microbatches, ranks=ranks))


def find_timetable(
    name: str, placement: Placement, num_microbatches: int, microbatch_group: int | None = None
) -> Timetable:
    """Return the timetable of a schedule's name, or of a .csv file; `microbatch_group` is that of `schedule_table`."""
    if is_schedule_file(name):
        table = read_schedule_file(Path(name), placement, microbatch_group=microbatch_group)
        # See Note [Waiting for sends] in torch_runtime.py.
        timetable = Timetable(name=Path(name).name, placement=placement, file=lower(table))
    else:
        timetable = Timetable(name=schedule_named(name), placement=placement, microbatch_group=microbatch_group)
    timetable.check(num_microbatches)
    return timetable
