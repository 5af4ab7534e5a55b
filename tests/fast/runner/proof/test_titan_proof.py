"""Llama on torchtitan's modules is proven against transformers' whole model, and mistakes in it are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runner.models import torchtitan
from runner.models.titan_modules import RMSNorm
from runner.proof.combination import Combination
from runner.proof.proving import compare
from runner.training import step
from tests.fast.manifests.models.built import read_config
from tests.fast.runner.models.decoders import Variant, variant_ids
from tests.fast.runner.models.titans import LLAMAS
from tests.fast.runner.proof.combinations import titan_combination

pytestmark = pytest.mark.usefixtures("one_rank")

LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
STRETCHED: Variant = ("tiny-llama", {"rope_scaling": LLAMA_3, "max_position_embeddings": 512})
TIED: Variant = ("tiny-llama", {"tie_word_embeddings": True})
FEW = (STRETCHED, TIED)
REST = LLAMAS


def combination_of(variant: Variant, *flags: str) -> Combination:
    name, changes = variant
    return titan_combination(read_config(name, **changes), 1, *flags)


@pytest.mark.parametrize(
    "variant",
    [*FEW, *(pytest.param(variant, marks=pytest.mark.slow) for variant in REST)],
    ids=variant_ids((*FEW, *REST)),
)
def test_every_gradient_of_a_family_on_torchtitan_is_that_of_transformers(variant: Variant) -> None:
    distances, problem = compare(combination_of(variant, "--ac", "full", "--loss-chunk", "5"))
    assert problem is None
    assert distances is not None
    assert distances.dtype == "fp64"
    assert max(distances.largest.values()) <= 1e-10


def test_parameters_that_are_not_trained_have_no_optimizer_state_to_reload() -> None:
    assert compare(combination_of(LLAMAS[0], "--train-only", "mlp"))[1] is None


def _without_scaling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torchtitan, "_stretch", lambda inv_freq, config: inv_freq)


def _heads_in_turn(patch: pytest.MonkeyPatch) -> None:
    """Queries share keys as if the heads of a group were apart."""
    before = torchtitan.CausalAttention.forward

    def forward(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        turns = q.shape[2] // k.shape[2]
        result: torch.Tensor = before(self, q, k.repeat(1, 1, turns, 1), v.repeat(1, 1, turns, 1), **more)
        return result

    patch.setattr(torchtitan.CausalAttention, "forward", forward)


def _another_epsilon(patch: pytest.MonkeyPatch) -> None:
    before = RMSNorm.__init__

    def init(self: Any, config: Any) -> None:
        before(self, config)
        self.eps = (self.eps or 0) * 2

    patch.setattr(RMSNorm, "__init__", init)


def _tied_twice(patch: pytest.MonkeyPatch) -> None:
    before = step.sync_gradients

    def sync(ties: Any) -> None:
        before(ties)
        for tie in ties:
            tie.leader.grad *= 2

    patch.setattr(step, "sync_gradients", sync)


@pytest.mark.parametrize(
    ("variant", "mistake"),
    [
        (STRETCHED, _without_scaling),
        (LLAMAS[0], _heads_in_turn),
        (LLAMAS[0], _another_epsilon),
        (TIED, _tied_twice),
    ],
    ids=["rope", "gqa", "norm", "tied"],
)
def test_a_mistake_in_a_family_on_torchtitan_is_found(
    variant: Variant, mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    distances, problem = compare(combination_of(variant))
    assert distances is not None
    assert problem is not None
    assert "gradients differ" in problem
