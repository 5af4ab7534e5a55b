"""The solver on true model shapes, beside DeepSpeed's and torchtitan's splits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.layouts import MODELS, Row, balanced_bounds, compare, show, uniform_bounds
from tests.fast.manifests.models.built import TRUE

DOCUMENT = Path(__file__).parents[4] / "docs" / "layouts.md"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for name in MODELS for row in compare(name)]


@pytest.mark.parametrize(
    ("weights", "num_stages", "bounds"),
    [  # given by DeepSpeed's partition_balanced
        ([4, 48, 41, 44, 12, 15, 40, 20], 3, (0, 3, 6, 8)),  # whose slowest stage has 93: 87 is possible
        ([1, 1, 1, 1], 2, (0, 2, 4)),
        ([0, 1, 1, 1, 1, 1, 0, 0], 2, (0, 4, 8)),
        ([5, 1, 1, 1], 4, (0, 1, 2, 3, 4)),
        ([5, 1], 4, (0, 1, 2, 2, 2)),
    ],
)
def test_bounds_of_deepspeed_are_those_that_it_returns(
    weights: Sequence[int], num_stages: int, bounds: Sequence[int]
) -> None:
    assert balanced_bounds(weights, num_stages) == bounds
    assert uniform_bounds(10, 4) == (0, 3, 6, 8, 10)


def test_no_split_of_theirs_has_a_faster_slowest_stage_or_rank(rows: list[Row]) -> None:
    assert {row.model for row in rows} == set(TRUE)
    for row in rows:
        for theirs in (row.deepspeed, row.torchtitan):
            assert row.reshard.stage <= theirs.stage * (1 + 1e-12), row
            assert row.reshard.rank <= theirs.rank * (1 + 1e-12), row


def test_the_documented_table_is_the_one_computed(rows: list[Row]) -> None:
    assert show(rows) in DOCUMENT.read_text()
