"""A schedule's name or a file of actions becomes a table that runs, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from manifests.errors import InputError, UsageError
from manifests.placement import Placement, Style
from manifests.schedules.actions import actions_of
from manifests.schedules.csvtext import write_csv
from manifests.schedules.lowering import compute_part, lower
from manifests.schedules.rules import SCHEDULES
from manifests.schedules.simulation import StageCosts, simulate
from manifests.schedules.tables import schedule_table
from runner.pipeline.timetable import Timetable, find_timetable


def placed(num_ranks: int, num_virtual: int = 1, style: Style = "loop") -> Placement:
    return Placement(num_stages=num_ranks * num_virtual, num_ranks=num_ranks, style=style)


V = placed(2, 2, "v")


@pytest.mark.parametrize(
    ("name", "placement", "splits"),
    [
        ("1f1b", placed(2), False),
        ("LoopedBFS", placed(2, 2), False),
        ("interleavedzerobubble", placed(2, 2), True),
        ("ZBVZeroBubble", V, True),
        ("DualPipeV", V, True),
    ],
)
def test_timetable_knows_which_schedules_split_backwards(name: str, placement: Placement, splits: bool) -> None:
    timetable = find_timetable(name, placement, 4)
    assert timetable.splits_backward is splits
    table = timetable.training(4)
    assert table == lower(schedule_table(name, placement, 4))
    assert splits == any(action.kind == "I" for steps in table.ranks for step in steps for action in actions_of(step))


@pytest.mark.parametrize(
    ("asked", "placement", "num_microbatches", "code"),
    [
        ("ZBV", placed(1), 4, "schedule.unknown"),
        ("DualPipeV", V, 3, "schedule.too-few-microbatches"),
        ("GPipe", V, 4, "schedule.other-placement"),
    ],
)
def test_schedule_that_cannot_run_is_refused(
    asked: str, placement: Placement, num_microbatches: int, code: str
) -> None:
    with pytest.raises(UsageError) as error:
        find_timetable(asked, placement, num_microbatches)
    assert (error.value.where, error.value.code) == ("--schedule", code)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("with_transfers", [False, True])
def test_file_gives_the_table_that_was_written(tmp_path: Path, name: str, with_transfers: bool) -> None:
    placement = V if name in ("ZBVZeroBubble", "DualPipeV") else placed(2, 1 if name in ("GPipe", "1F1B") else 2)
    table = schedule_table(name, placement, 4)
    path = tmp_path / "table.csv"
    path.write_text(write_csv(lower(table) if with_transfers else table))
    found = find_timetable(str(path), placement, 4)
    assert found.training(4) == lower(table)
    assert found.splits_backward == find_timetable(name, placement, 4).splits_backward


GOOD = write_csv(schedule_table("GPipe", placed(2), 2))


@pytest.mark.parametrize(
    ("content", "num_ranks", "num_microbatches", "code"),
    [
        (GOOD, 4, 2, "schedule.misplaced-stages"),
        (GOOD, 2, 4, "schedule.microbatches"),
        (GOOD.replace("1B1", "1B0"), 2, 2, "schedule.wrong-actions"),
        (None, 2, 2, "schedule.unreadable"),
        (b"\xff\xfe", 2, 2, "schedule.unreadable"),
        # torch would use the loss of one microbatch for the gradients of another.
        ("0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n", 2, 2, "schedule.microbatch-order"),
    ],
)
def test_file_that_cannot_train_is_refused_before_anything_starts(
    content: str | bytes | None, num_ranks: int, num_microbatches: int, code: str, tmp_path: Path,
    wording: Callable[[str], None],
) -> None:  # fmt: skip
    path = tmp_path / "table.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((InputError, UsageError)) as error:
        find_timetable(str(path), placed(num_ranks), num_microbatches)
    where = "--schedule" if code == "schedule.microbatches" else str(path)
    assert (error.value.where, error.value.code) == (where, code)
    if code not in ("schedule.misplaced-stages", "schedule.wrong-actions"):  # of manifests
        wording(str(error.value))


@pytest.mark.parametrize("placement", [placed(3), placed(2, 3), V])
@pytest.mark.parametrize("num_microbatches", [1, 5])
def test_evaluation_takes_every_microbatch_forward_through_every_stage(
    placement: Placement, num_microbatches: int
) -> None:
    table = Timetable(name="DualPipeV", placement=placement).forward(num_microbatches)
    actions = [str(action) for steps in table.ranks for step in steps for action in actions_of(step)]
    stages, microbatches = range(placement.num_stages), range(num_microbatches)
    assert sorted(actions) == sorted(f"{stage}F{microbatch}" for stage in stages for microbatch in microbatches)


@pytest.mark.parametrize(("placement", "num_idle"), [(placed(3), 2), (placed(2, 3), 1), (placed(4, 2, "v"), 6)])
def test_evaluation_leaves_the_last_rank_idle_only_before_its_first_input_and_after_its_last_result(
    placement: Placement, num_idle: int
) -> None:
    num_microbatches = 4 * placement.num_ranks
    table = compute_part(Timetable(name="GPipe", placement=placement).forward(num_microbatches))
    costs = StageCosts.of([1.0] * placement.num_stages, [1.0] * placement.num_stages)
    assert simulate(table, costs).makespan_s == placement.num_virtual * num_microbatches + num_idle
