"""Which modules of transformers' models get adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from manifests.errors import UserError
from manifests.models.adapters import parse_target
from runner.config.lora import LoraOptions
from runner.models.adapters import Adapters
from runner.models.regions import Region

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
MAMBA = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def adapters_of(kind: str, target: str, *, experts: bool = False, **fields: Any) -> Adapters:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "num_hidden_layers": 4, **fields})
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    lora = LoraOptions(
        rank=2, alpha=2.0, target=parse_target(target), experts=experts, dropout=0.0, is_rank_scaled=False
    )
    regions = {
        name: (Region(fqn=name, shape=(), corner=(), sizes=(), dims=()),) for name, _ in model.named_parameters()
    }
    return Adapters.find(model, lora, "lm_head", regions, str)


def leaves_of(adapters: Adapters) -> set[str]:
    return {path.rpartition(".")[2] for path in adapters.linear}


def test_modules_whose_forward_a_kernel_replaces_have_none() -> None:
    assert leaves_of(adapters_of("Mamba2", "all-linear", **MAMBA)) == {"in_proj"}
    assert leaves_of(adapters_of("Mamba", "all-linear")) == {"in_proj"}
    for target in ("in_proj,out_proj", ".*_proj"):
        with pytest.raises(UserError) as refused:
            adapters_of("Mamba2", target, **MAMBA)
        assert refused.value.code == "options.trains-nothing"


def test_convolutions_are_no_experts_and_attention_without_softmax_has_all() -> None:
    found = adapters_of("Qwen3Next", "out_proj", experts=True, **EXPERTS)
    assert found.parameters == ("experts.gate_up_proj", "experts.down_proj")
    assert leaves_of(found) == {"out_proj"}


@pytest.mark.parametrize("name", ["v_porj", "lm_head"])
def test_each_name_must_match(name: str) -> None:
    adapters_of("Llama", "q_proj,v_proj").check_names("Llama")
    with pytest.raises(UserError) as refused:
        adapters_of("Llama", f"q_proj,{name}").check_names("Llama")
    assert (refused.value.where, refused.value.code) == (f"--lora-target {name}", "options.trains-nothing")
