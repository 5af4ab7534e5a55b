"""The solver on true model shapes, beside DeepSpeed's and torchtitan's splits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from bench.layouts import MODELS, Row, balanced_bounds, compare, show, uniform_bounds, write
from manifests.models import model_shape
from reshard.estimate.costs import costs_of
from reshard.layouts import parse_layout
from reshard.layouts.model import inventory_of_modules
from tests.fast.manifests.models.built import TRUE, read_config
from tests.steps import steps_of

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


def test_writing_the_table_leaves_the_rest_of_the_document(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "layouts.md"
    path.write_text("# Layouts\n\nText.\n")
    write("| old |", path)
    path.write_text(path.read_text() + "\nMore.\n")
    write(show(rows), path)
    text = path.read_text()
    assert text.startswith("# Layouts\n\nText.\n\n## Comparison with DeepSpeed's")
    assert text.endswith("<!-- end -->\n\nMore.\n")
    assert show(rows) in text
    assert "old" not in text


def test_deepseek_v3_on_16_ranks_of_2_stages_solves_in_few_steps() -> None:
    shape = model_shape(read_config("deepseek-v3"))
    for model in (shape, shape.without(shape.optional)):
        costs = costs_of(model, seq_len=4096, nbytes={})
        inventory = inventory_of_modules(model.modules, model.num_layers)
        for cost in ("params", "flops", "time"):
            text = f"balance:{cost},pp=16,vpp=2"
            assert steps_of(partial(parse_layout, text, inventory, costs=costs)) < 150_000
