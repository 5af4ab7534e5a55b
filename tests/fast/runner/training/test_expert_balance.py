"""Routers are found, and the auxiliary loss is transformers'; what watches them is refused where there are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from manifests.errors import UserError
from manifests.models.trainable import generic_entry
from runner.config.loss import BalanceOptions
from runner.config.parallel_dims import ParallelDims
from runner.config.schema import BatchOptions
from runner.models.family import Family
from runner.models.generic import Generic
from runner.models.routers import routers_of
from runner.parallel.mesh import Mesh
from runner.pipeline.chunk import StageChunk, materialize
from runner.training.expert_balance import balance_experts, balance_loss
from tests.fast.manifests.models.catalogued import config_of, quiet

# With the bias in the router, in the module around it, and none.
ROUTED = {
    "DeepseekV3ForCausalLM": True, "Glm4MoeForCausalLM": True, "MiniMaxM2ForCausalLM": True,
    "MixtralForCausalLM": False, "GptOssForCausalLM": False, "GraniteMoeHybridForCausalLM": False,
}  # fmt: skip
MESH = Mesh(degrees=ParallelDims(pipeline=1), rank=0)
BATCH = BatchOptions(global_batch=1, microbatch=1, seq_len=8)


def generic(architecture: str, **changes: Any) -> Generic:
    entry = generic_entry(architecture)
    assert entry is not None
    with quiet():
        return Generic(
            entry, {**config_of(architecture, **changes).to_dict(), "architectures": [architecture]}, max_seq_len=8
        )


def chunk_of(family: Family) -> StageChunk:
    return StageChunk(family, 0, family.modules)


@pytest.mark.parametrize("architecture", ROUTED)
def test_routers_and_their_biases_are_found_in_transformers(architecture: str) -> None:
    chunk = chunk_of(generic(architecture))
    routers = list(routers_of(chunk.family, chunk.body))
    assert routers
    assert len({router.layer for router in routers}) == len(routers)
    for router in routers:
        assert (router.bias is not None) == ROUTED[architecture]
        assert router.num_experts == router.module.weight.shape[0]


@pytest.mark.parametrize("top_k", [1, 3])
def test_auxiliary_loss_of_a_layer_and_its_gradient_are_those_of_transformers(top_k: int) -> None:
    logits = torch.randn(24, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = load_balancing_loss_func((logits,), 8, top_k)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    loss = balance_loss(logits, top_k)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_auxiliary_loss_of_a_model_is_what_transformers_adds(architecture: str, dtype: torch.dtype) -> None:
    """Its logits are of the model's dtype, and so is the softmax by which it counts; the router's is in float32."""
    torch.manual_seed(0)
    with quiet():
        alone = AutoModelForCausalLM.from_config(config_of(architecture, num_hidden_layers=1), dtype=dtype)
    chunk = chunk_of(generic(architecture, num_hidden_layers=1))
    materialize(chunk, device=torch.device("cpu"), dtype=dtype)
    chunk.body.model.load_state_dict(alone.state_dict())
    balance = balance_experts([chunk], BalanceOptions(aux_loss=1.0), BATCH, MESH, is_compiled=False)
    assert balance is not None
    tokens = torch.arange(64)[None] % 50
    balance.start(1, None)
    weights = [router.module.weight for router in routers_of(chunk.family, chunk.body)]
    (gradient,) = torch.autograd.grad(chunk.body(tokens).float().sum() * 0, weights)
    expected = alone(tokens, output_router_logits=True).aux_loss
    assert balance.addends is not None
    assert balance.finish([balance.addends.tolist()]).aux_loss == pytest.approx(expected.item(), rel=1e-6)
    (router,) = (part for name, part in alone.named_modules() if name.endswith("mlp.gate"))
    (expected_gradient,) = torch.autograd.grad(expected, router.weight)
    assert expected_gradient.any()
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-7)


def test_loads_cost_nothing_in_steps_that_do_not_record_them() -> None:
    chunk = chunk_of(generic("Qwen3MoeForCausalLM", num_local_experts=400))
    watched = {aux: balance_experts([chunk], BalanceOptions(aux_loss=aux), BATCH, MESH, is_compiled=False)
               for aux in (0.0, 0.1)}  # fmt: skip
    for aux, balance in watched.items():
        assert balance is not None
        needs = []
        for step in (1, 2):  # four layers have more than 1,000 experts, so every second step is recorded
            balance.start(step, None)
            needs.append(balance.addends is not None)
        assert needs == [bool(aux), True]


@pytest.mark.parametrize(
    ("architecture", "dtype", "options", "where"),
    [
        ("MixtralForCausalLM", torch.float32, BalanceOptions(bias_rate=0.1), "--router-bias-rate"),
        ("Olmo2ForCausalLM", torch.float32, BalanceOptions(bias_rate=0.1), "--router-bias-rate"),
        ("Olmo2ForCausalLM", torch.float32, BalanceOptions(aux_loss=0.1), "--router-aux-loss"),
        ("DeepseekV3ForCausalLM", torch.bfloat16, BalanceOptions(bias_rate=0.1), "--router-bias-rate"),
    ],
)
def test_what_acts_on_routers_is_refused_without_them(
    architecture: str, dtype: torch.dtype, options: BalanceOptions, where: str
) -> None:
    chunk = chunk_of(generic(architecture))
    chunk.to(dtype)
    with pytest.raises(UserError) as error:
        balance_experts([chunk], options, BATCH, MESH, is_compiled=False)
    assert (error.value.code, error.value.where) == ("options.router", where)


def test_compiled_routers_are_watched_only_to_balance_them() -> None:
    chunk = chunk_of(generic("DeepseekV3ForCausalLM"))
    assert balance_experts([chunk], BalanceOptions(), BATCH, MESH, is_compiled=True) is None
    assert balance_experts([chunk], BalanceOptions(), BATCH, MESH, is_compiled=False) is not None
    assert balance_experts([chunk], BalanceOptions(bias_rate=0.1), BATCH, MESH, is_compiled=True) is not None
    assert (
        balance_experts([chunk_of(generic("Olmo2ForCausalLM"))], BalanceOptions(), BATCH, MESH, is_compiled=False)
        is None
    )
