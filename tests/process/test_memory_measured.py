"""The planner's memory against what ranks of the runner hold, by dtype policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.memory_cases import CASES, ONE_GB, Case
from tests.process.torchrun import launch

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

PARTS = ("weights", "gradients", "optimizer")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_rank_holds_what_the_plan_says(case: Case, tmp_path: Path) -> None:
    launch(2, "memory_worker.py", case.name, tmp_path)
    for rank, estimate in enumerate(case.estimate().ranks):
        measured = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for part in PARTS:
            # Besides moments AdamW keeps a step count for each parameter.
            assert measured[part] == pytest.approx(getattr(estimate, part), rel=1e-4), part
        if estimate.weights:
            held = estimate.total - estimate.activations  # which are freed when the backward pass ends
            assert measured["resident"] == pytest.approx(held, rel=0.15)


@pytest.mark.slow
def test_at_no_time_does_a_rank_hold_much_more_than_the_plan_says(tmp_path: Path) -> None:
    launch(ONE_GB.num_ranks, "memory_worker.py", ONE_GB.name, tmp_path)
    for rank, estimate in enumerate(ONE_GB.estimate().ranks):
        peak = json.loads((tmp_path / f"rank{rank}.json").read_text())["peak"]
        assert peak == pytest.approx(estimate.total, rel=0.15), rank
        own = estimate.weights + estimate.gradients + estimate.optimizer + estimate.activations
        assert peak <= own * 1.2, rank
