"""The memory that `reshard plan` and the runner estimate, against what ranks of the runner have in use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.builders import pack
from tests.fast.runner.tiny import save_model
from tests.process.runner.training.memory_cases import PIPELINE, REUSING, SAMPLE, SHARED, SIZES, Case, warm_up
from tests.process.torchrun import launch

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("memory")
    save_model(place / "model", **SIZES)
    return pack(place / "model", place / "packed")


def check(
    packed: Path, out: Path, num_ranks: int, cases: Sequence[Case], policy: str = "compact", dtype: str = "fp32"
) -> None:
    asked = [{**case, "root": str(packed), "policy": policy} for case in (*warm_up(num_ranks, dtype), *cases)]
    (out / "cases.json").write_text(json.dumps(asked))
    launch(num_ranks, "runner/training/memory_worker.py", out / "cases.json", out, timeout_s=800)
    found = {
        (case["name"], rank): json.loads((out / f"{case['name']}-{rank}.json").read_text())
        for case in cases
        for rank in range(num_ranks)
    }
    off = {name: rank["peak"] / rank["planned"]["total"] for name, rank in found.items()}
    assert {name: ratio for name, ratio in off.items() if not 0.9 < ratio < 1.1} == {}
    if num_ranks == 2:  # nothing is gathered or reduced in between
        for name, rank in found.items():
            for part in ("weights", "gradients", "optimizer"):
                # Besides its moments AdamW has a step count for each parameter.
                assert rank[part] == pytest.approx(rank["planned"][part], rel=1e-3), (name, part)


@pytest.mark.parametrize("policy", ["compact", pytest.param("fast", marks=pytest.mark.slow)])
def test_peak_of_each_rank_is_within_a_tenth_of_the_plan_of_its_policy(
    packed: Path, tmp_path: Path, policy: str
) -> None:
    check(packed, tmp_path, 2, SAMPLE, policy)


@pytest.mark.slow
@pytest.mark.parametrize("case", REUSING, ids=lambda case: case["name"])
def test_ranks_that_reuse_freed_memory_are_within_a_tenth_of_their_plan(
    packed: Path, tmp_path: Path, case: Case
) -> None:
    check(packed, tmp_path, 2, [case], "fast")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PIPELINE)
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, PIPELINE), (4, SHARED)], ids=["pp", "fsdp and tp"])
def test_peak_is_within_a_tenth_of_the_plan_in_every_dtype(
    packed: Path, tmp_path: Path, num_ranks: int, cases: Mapping[str, Sequence[Case]], dtype: str
) -> None:
    check(packed, tmp_path, num_ranks, cases[dtype], dtype=dtype)
