"""Options that make no sense are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.errors import UsageError
from manifests.placement import Placement
from runner.recipe import BatchOptions, DataOptions, OptimOptions, check_schedule, default_schedule


def placed(num_ranks: int, num_virtual: int = 1, style: Any = "loop") -> Placement:
    return Placement(num_stages=num_ranks * num_virtual, num_ranks=num_ranks, style=style)


@pytest.mark.parametrize(
    ("name", "placement", "num_microbatches", "expected"),
    [
        ("GPipe", placed(4), 1, "GPipe"),
        ("gpipe", placed(1), 1, "GPipe"),
        ("1F1B", placed(4), 4, "1F1B"),
        ("interleaved1f1b", placed(4, 2), 3, "Interleaved1F1B"),
        ("Interleaved1F1B", placed(4, 2), 10, "Interleaved1F1B"),
        ("Interleaved1F1B", placed(1, 3), 7, "Interleaved1F1B"),
    ],
)
def test_schedule_that_can_run_is_given_by_its_own_name(
    name: str, placement: Placement, num_microbatches: int, expected: str
) -> None:
    assert check_schedule(name, placement, num_microbatches) == expected


@pytest.mark.parametrize(
    ("name", "placement", "num_microbatches", "message"),
    [
        (
            "ZBV",
            placed(2),
            4,
            "--schedule: 'ZBV' is not known\nhint: known: GPipe, 1F1B, Interleaved1F1B",
        ),
        (
            "GPipe",
            placed(2, 2),
            4,
            "--schedule: GPipe needs 1 stage on each rank, the manifest has 2\n"
            "hint: take Interleaved1F1B, or pack again: reshard pack … --layout pp=2",
        ),
        (
            "1F1B",
            placed(4),
            3,
            "--microbatch: 1F1B needs at least 4 microbatches (one for each stage), found 3\n"
            "hint: make --global-batch larger or --microbatch smaller, or take GPipe",
        ),
        (
            "Interleaved1F1B",
            placed(2),
            4,
            "--schedule: Interleaved1F1B needs at least 2 stages on each rank, the manifest has 1\n"
            "hint: take 1F1B or GPipe, or pack again with more stages: reshard pack … --layout pp=2,vpp=2",
        ),
        (
            "Interleaved1F1B",
            placed(2, 2, "v"),
            4,
            "--schedule: Interleaved1F1B needs stages placed in a loop, the manifest places them in a v\n"
            "hint: pack again: reshard pack … --layout pp=2,vpp=2",
        ),
        (
            "Interleaved1F1B",
            placed(4, 2),
            9,
            "--microbatch: Interleaved1F1B deals 9 microbatches over 4 ranks in 2 rounds, which must come "
            "out even\nhint: take a number of microbatches that is a multiple of 4",
        ),
    ],
)
def test_schedule_that_cannot_run_is_refused_with_the_nearest_right_choice(
    name: str, placement: Placement, num_microbatches: int, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        check_schedule(name, placement, num_microbatches)
    assert str(error.value) == message


def test_default_schedule_fits_the_placement() -> None:
    assert default_schedule(placed(4)) == "1F1B"
    assert default_schedule(placed(4, 2)) == "Interleaved1F1B"


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((0, 1, 8), "--global-batch: expected at least 1, found 0"),
        ((8, 0, 8), "--microbatch: expected at least 1, found 0"),
        ((8, 1, 0), "--seq-len: expected at least 1, found 0"),
        (
            (8, 3, 8),
            "--global-batch: expected a multiple of --microbatch 3, found 8\nhint: the next ones are 6 and 9",
        ),
        (
            (2, 4, 8),
            "--global-batch: expected a multiple of --microbatch 4, found 2\nhint: the next one is 4",
        ),
    ],
)
def test_batch_that_cannot_be_cut_is_refused(counts: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UsageError) as error:
        BatchOptions(global_batch=counts[0], microbatch=counts[1], seq_len=counts[2])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "--lr: expected a number from 0 up, found -1.0"),
        ({"max_norm": float("nan")}, "--max-norm: expected a number from 0 up, found nan"),
        ({"betas": (0.9, 1.0)}, "--betas: expected two numbers from 0 up to below 1, found (0.9, 1.0)"),
        (
            {"decay": "cosine", "warmup_steps": 5, "decay_steps": 5},
            "--decay-steps: expected more than --warmup-steps 5, found 5",
        ),
    ],
)
def test_optimizer_value_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        OptimOptions(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize("sources", [(), ("synthetic", "a.txt")])
def test_sources_that_do_not_go_together_are_refused(sources: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        DataOptions(sources=sources)
    assert str(error.value) == "--data: expected files, folders or globs, or the one word 'synthetic'"
