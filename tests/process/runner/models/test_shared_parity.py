"""Architectures of the catalogue whose parameters two ranks share, against transformers' whole model on each."""

from __future__ import annotations

import json

import pytest

from manifests.models.catalogue import catalogued
from manifests.models.trainable import (
    hands_on_trees,
    is_generic,
    refuses_cp,
    why_not_expert_parallel,
    why_not_tensor_parallel,
)
from tests.process.torchrun import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

GENERIC = tuple(name for name in catalogued() if is_generic(name))
SHARDED = tuple(name for name in catalogued() if not why_not_tensor_parallel(name))
DISTRIBUTED = tuple(name for name in catalogued() if not why_not_expert_parallel(name))
CASES = [
    *((name, "tensor") for name in SHARDED),
    *((name, "expert") for name in DISTRIBUTED),
    *((name, "shard") for name in GENERIC if not hands_on_trees(name)),
    *((name, "context") for name in GENERIC if not hands_on_trees(name) and not refuses_cp(name)),
]
# Linear attention that transformers computes in float32, in chunks.
TOLERANCES = {"KimiLinearForCausalLM": 1e-5}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[list[float] | str]]:
    """Return by case, for each rank, what differs most in logits, loss and gradients, or an error."""
    place = tmp_path_factory.mktemp("shared")
    (place / "cases.json").write_text(json.dumps([(name, dim, {}) for name, dim in CASES]))
    launch(2, "runner/models/shared_worker.py", place / "cases.json", place / "found.json", timeout_s=2500)
    ranks = json.loads((place / "found.json").read_text())
    return dict(zip(CASES, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_that_share_parameters_compute_what_the_whole_model_does(
    case: tuple[str, str], found: dict[tuple[str, str], list[list[float] | str]]
) -> None:
    for rank in found[case]:
        assert not isinstance(rank, str), rank
        assert max(rank) <= TOLERANCES.get(case[0], 1e-6), rank
