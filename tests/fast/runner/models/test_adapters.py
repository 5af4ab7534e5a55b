"""Which modules of transformers' models get adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from manifests.errors import UserError
from manifests.models import is_expert, model_shape
from manifests.models.adapters import (
    ALL_LINEAR,
    PEFT_PREFIX,
    Target,
    adapter_sizes,
    is_adapter,
    parse_peft_config,
    parse_target,
)
from manifests.models.catalogue import catalogued
from manifests.models.memory import memory_of
from manifests.models.trainable import generic_entry, is_generic
from manifests.models.training import POLICIES, HostMemory, Recompute, Training
from runner.config.lora import LoraOptions
from runner.models.adapters import Adapters
from runner.models.generic import Generic
from runner.models.regions import Region
from tests.fast.manifests.models.catalogued import quiet, stored_by
from tools.tiny_models import tiny_config

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
MAMBA = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
FEW = ("FalconForCausalLM", "GPT2LMHeadModel", "OlmoeForCausalLM")
GENERIC = tuple(
    name for name in catalogued()
    if is_generic(name) and not name.endswith("ConditionalGeneration")  # files name decoders as in another class
    and name not in ("FuyuForCausalLM", "XGLMForCausalLM")  # likewise; has no mask in float64
)  # fmt: skip
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


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
        {"target_modules": ["w1", "q_proj"], "layers_to_transform": 1, "layers_pattern": "experts"},
        {"target_modules": ["w1", "q_proj"], "layers_to_transform": [0, 3], "layers_pattern": ["h", "l[a-z]+"]},
        {"target_modules": ["model.layers.0.q_proj", "w1"], "layers_to_transform": [2, 3]},
        {"target_modules": ["q_proj", "w1"], "layers_to_transform": [], "exclude_modules": ["experts.1.w1"]},
        {"target_modules": ["q_proj", "w1"], "exclude_modules": r".*\.[02]\..*"},
        {"target_modules": ["q_proj", "w1"], "layers_to_transform": [], "layers_pattern": ["layers"]},
        {"target_modules": r"model\.layers\.\d\..*w1", "exclude_modules": ["w1"]},
        {"target_modules": r".*\.1\..*w1", "modules_to_save": ["layers.2", "lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["layers.2", "head"]},
        {"target_modules": []},
    ],
)  # fmt: skip
def test_config_selects_the_modules_that_peft_selects(fields: dict[str, Any]) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    leaves = ("q_proj", "v_proj", *(f"experts.{expert}.w1" for expert in range(4)))
    modules = [f"model.layers.{layer}.{leaf}" for layer in range(4) for leaf in leaves]
    text = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **fields})
    config = parse_peft_config(text.encode(), "here")
    expected = {name: bool(check_target_module_exists(LoraConfig(**fields), name)) for name in (*modules, "lm_head")}
    assert {name: config.selects(name, head="lm_head") for name in expected} == expected


def test_all_linear_selects_no_head_and_target_parameters_select_a_weight() -> None:
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    names = ("lm_head", "model.layers.0.q_proj")
    for given, expected in (
        ({"target_modules": "All-Linear"}, [False, True]),
        ({"target_modules": [], "target_parameters": ["lm_head.weight"]}, [True, False]),
        ({}, [True, True]),  # peft's own default, which depends on the model
    ):
        config = parse_peft_config(json.dumps({**fields, **given}).encode(), "here")
        assert [config.selects(name, head="lm_head") for name in names] == expected


@pytest.mark.parametrize("name", ["v_porj", "lm_head"])
def test_each_name_must_match(name: str) -> None:
    adapters_of("Llama", "q_proj,v_proj").check_names("Llama")
    with pytest.raises(UserError) as refused:
        adapters_of("Llama", f"q_proj,{name}").check_names("Llama")
    assert (refused.value.where, refused.value.code) == (f"--lora-target {name}", "options.trains-nothing")


@pytest.mark.parametrize(
    "architecture", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in GENERIC]
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")  # of peft
def test_adapters_of_every_architecture_have_the_names_and_gradients_of_peft(architecture: str) -> None:
    from peft import LoraConfig, get_peft_model
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

    family = family_of(architecture, ALL_LINEAR)
    assert family.adapters is not None
    if family.adapters.experts:  # beside experts, peft takes names of dense layers for older ones of experts
        with quiet():
            family.whole()(torch.zeros(1, 4, dtype=torch.long))
        family = family_of(architecture, ".*att.*(?<!gate_proj)")
    with quiet():
        adapted = family.whole().model.double().eval()
        plain = family_of(architecture, None).whole().model.double().eval()
    adapters = family.adapters
    assert adapters is not None
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=list(adapters.target), target_parameters=list(adapters.parameters) or None,
        fan_in_fan_out=adapters.is_transposed,
    )  # fmt: skip
    adapted.load_state_dict(plain.state_dict(), strict=False)
    names = {name: region.fqn for name, region in adapters.tensors.items()}
    ours: dict[str, Any] = dict(adapted.named_parameters())
    noise = torch.Generator().manual_seed(0)
    for name in names:
        ours[name].data.normal_(std=0.1, generator=noise)
    peft: Any = get_peft_model(plain, config).eval()
    saved = {f"{PEFT_PREFIX}{fqn}": ours[name].detach() for name, fqn in names.items()}
    assert {name: value.shape for name, value in get_peft_model_state_dict(peft).items()} == {
        name: value.shape for name, value in saved.items()
    }
    set_peft_model_state_dict(peft, saved)
    theirs = {name.replace(".default", ""): weight for name, weight in peft.named_parameters()}
    tokens = torch.randint(family.vocab_size, (2, 8), generator=noise)
    logits = [model(input_ids=tokens, use_cache=False).logits for model in (adapted, peft)]
    assert (logits[0] - logits[1]).abs().max() <= 1e-10 * logits[1].abs().max()
    towards = torch.randn(logits[0].shape, generator=noise, dtype=torch.float64)
    for some in logits:
        some.backward(towards)
    for name, fqn in names.items():
        expected, gradient = theirs[f"{PEFT_PREFIX}{fqn}"].grad, ours[name].grad
        assert (gradient is None) == (expected is None), name
        if gradient is not None:
            assert (gradient - expected).abs().max() <= 1e-10 * max(1, expected.abs().max()), name


def test_plans_count_the_experts_that_adapters_are_added_to() -> None:
    """Autograd keeps their sums from a microbatch's forward to its backward, unless layers are recomputed.

    It also keeps the inputs of experts then, which plans count of frozen ones, too.
    """
    config, stored = stored_by("Qwen3MoeForCausalLM")
    shape, kept = model_shape(config, stored=stored), list[int]()
    planned: dict[Recompute, list[int]] = {"none": [], "selective": [], "full": []}
    for has_experts in (False, True):
        family = family_of("Qwen3MoeForCausalLM", ALL_LINEAR, has_experts=has_experts)
        kept.append(kept_by_forward(family.whole().model.bfloat16()))
        sizes = dict(adapter_sizes(shape, ALL_LINEAR, 2, has_experts=has_experts))
        training = Training(
            policy=POLICIES["bf16"], microbatch=1, seq_len=8, adapters=sizes, trains=lambda fqn: ".lora_" in fqn
        )
        for recompute, numbers in planned.items():
            without, with_one = (memory_of(shape, replace(training, recompute=recompute), count) for count in (0, 1))
            numbers.append(sum(with_one.values()) - sum(without.values()))
    sums = 2 * sum(shape.count_params(fqn) for fqn in shape.tensors if is_expert(fqn))
    for recompute, (without, with_experts) in planned.items():
        assert with_experts - without == (0 if recompute == "full" else sums), recompute
    assert sums < kept[1] - kept[0] < 1.1 * sums


def test_plans_count_inputs_that_are_dropped_out() -> None:
    config, stored = stored_by("LlamaForCausalLM")
    sizes = dict(adapter_sizes(model_shape(config, stored=stored), ("o_proj",), 2, has_experts=False))
    kept, planned = list[int](), dict[HostMemory | None, list[int]]()
    for dropout in (0.0, 0.5):
        family = family_of("LlamaForCausalLM", ("o_proj",), has_experts=False, dropout=dropout)
        kept.append(kept_by_forward(family.whole().model.bfloat16()))
        for host_memory in ("compact", None):
            training = Training(
                policy=POLICIES["bf16"], microbatch=1, seq_len=8, adapters=sizes, trains=lambda fqn: ".lora_" in fqn,
                dropout_rank=2 if dropout else 0, host_memory=host_memory,
            )  # fmt: skip
            without, with_one = (memory_of(model_shape(config, stored=stored), training, count) for count in (0, 1))
            planned.setdefault(host_memory, []).append(sum(with_one.values()) - sum(without.values()))
    assert planned["compact"][1] - planned["compact"][0] == kept[1] - kept[0] > 0
    assert 4 * (planned[None][1] - planned[None][0]) == 3 * (kept[1] - kept[0])  # a mask is a byte there


def kept_by_forward(model: torch.nn.Module) -> int:
    """Return the bytes that autograd keeps of a forward with adapters and gradients of the first layer's input."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(f".{name}") or "embed_tokens" in name)
    storages, tensors = dict[int, int](), list[torch.Tensor]()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)  # so that no storage is used twice
        return tensor

    with quiet(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.arange(8)[None], use_cache=False)
    return sum(storages.values())


def family_of(architecture: str, target: Target | None, *, has_experts: bool = True, dropout: float = 0.0) -> Generic:
    entry = generic_entry(architecture)
    assert entry is not None
    with quiet():
        family = Generic(entry, tiny_config(getattr(transformers, architecture)).to_dict(), max_seq_len=16)
        family._config._experts_implementation = "eager"  # in any dtype
        if target is not None:
            lora = LoraOptions(
                rank=2, alpha=4.0, target=target, experts=has_experts, dropout=dropout, is_rank_scaled=False
            )
            family.add_adapters(lora)
    return family
