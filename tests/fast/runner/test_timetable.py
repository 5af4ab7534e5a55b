"""A schedule's name or a file of actions becomes a table that runs, or is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests.errors import InputError, UsageError
from manifests.placement import Placement, Style
from manifests.schedules import SCHEDULES, actions_of, lower, schedule_table, write_csv
from runner.pipeline.timetable import Timetable, find_timetable, read_timetable


def placed(num_ranks: int, num_virtual: int = 1, style: Style = "loop") -> Placement:
    return Placement(num_stages=num_ranks * num_virtual, num_ranks=num_ranks, style=style)


V = placed(2, 2, "v")


@pytest.mark.parametrize("name", SCHEDULES)
def test_single_rank_takes_every_schedule_with_any_stages_and_microbatches(name: str) -> None:
    timetable = find_timetable(name.upper(), placed(1, 3), 1)
    assert (timetable.name, timetable.splits_backward) == (name, False)


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
    ("asked", "placement", "num_microbatches", "message"),
    [
        ("ZBV", placed(1), 4, "--schedule: 'ZBV' is not known\nhint: did you mean ZBVZeroBubble? known: "),
        ("1F1B", placed(4), 3, "--schedule: 1F1B needs at least 4 microbatches, one for each stage, found 3\n"),
        ("GPipe", V, 4, "--schedule: GPipe needs 1 stage on each rank, found 2\nhint: take the schedule ZBVZeroBubble"),
    ],
)
def test_schedule_that_cannot_run_is_refused(
    asked: str, placement: Placement, num_microbatches: int, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        find_timetable(asked, placement, num_microbatches)
    assert str(error.value).startswith(message)


def test_another_number_of_microbatches_is_checked_when_it_comes() -> None:
    timetable = find_timetable("1F1B", placed(4), 4)
    with pytest.raises(UsageError, match="1F1B needs at least 4 microbatches"):
        timetable.training(3)


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


def refusal_of(text: str, placement: Placement, path: Path, num_microbatches: int = 2) -> str:
    path.write_text(text)
    with pytest.raises((InputError, UsageError)) as error:
        find_timetable(str(path), placement, num_microbatches)
    return str(error.value).replace(str(path), "FILE")


def test_file_that_cannot_train_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path, two = tmp_path / "table.csv", placed(2)
    good = write_csv(schedule_table("GPipe", two, 2))
    assert refusal_of(good, placed(4), path) == "FILE: expected 4 rows, one for each rank, found 2"
    assert refusal_of(good, two, path, 4) == (
        "--schedule: table.csv is for 2 microbatches, found 4\nhint: make --global-batch 2 times --microbatch"
    )
    assert refusal_of(good.replace("1B1", "1B0"), two, path).startswith("FILE: stage 1 takes microbatch 0 back by 2 B")
    with pytest.raises(InputError, match="cannot be read: No such file or directory"):
        read_timetable(tmp_path / "missing.csv", two)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read: 'utf-8' codec can't decode"):
        read_timetable(path, two)


def test_file_whose_last_stage_is_out_of_order_is_refused(tmp_path: Path) -> None:
    """torch would take the gradients of one microbatch from the loss of another."""
    text = "0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n"
    assert refusal_of(text, placed(2), tmp_path / "table.csv") == (
        "FILE: stage 1, the last one, takes the microbatches in the order 1, 0\n"
        "hint: number them in the order in which the last stage computes them: torch numbers losses so"
    )


@pytest.mark.parametrize("placement", [placed(3), placed(2, 3), V])
@pytest.mark.parametrize("num_microbatches", [1, 5])
def test_evaluation_takes_every_microbatch_forward_through_every_stage(
    placement: Placement, num_microbatches: int
) -> None:
    table = Timetable(name="DualPipeV", placement=placement).forward(num_microbatches)
    actions = [str(action) for steps in table.ranks for step in steps for action in actions_of(step)]
    stages, microbatches = range(placement.num_stages), range(num_microbatches)
    assert sorted(actions) == sorted(f"{stage}F{microbatch}" for stage in stages for microbatch in microbatches)
