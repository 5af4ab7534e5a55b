"""What autograd keeps of functions that a config chooses, of MLPs and on logits, and of norms by their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from manifests.models import model_shape
from manifests.models.shape import ModelShape
from manifests.models.training import POLICIES, Training, masked_elements, scores_nbytes
from tests.fast.manifests.models.built import build, read_config
from tests.fast.manifests.models.catalogued import config_of, quiet, stored_by

_TOKENS = torch.arange(2 * 8).view(2, 8)


def kept(config: dict[str, Any], model: PreTrainedModel | None = None) -> int:
    """Give the numbers that autograd keeps of a forward and its loss."""
    model, storages, tensors = model or build(config), dict[int, int](), list[torch.Tensor]()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
        tensors.append(tensor)  # so that no storage is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(_TOKENS, use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), _TOKENS.flatten())
    return sum(storages.values())


def planned(config: dict[str, Any]) -> int:
    work = model_shape(config).work.values()
    return _TOKENS.numel() * sum(of_module.saved + of_module.saved_fp32 for of_module in work)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("tiny-phi", "hidden_act", None),
        ("tiny-phi", "hidden_act", "relu"),
        ("tiny-gpt2", "activation_function", None),
        ("tiny-gpt2", "activation_function", "relu"),
        ("tiny-opt", "activation_function", None),
        ("tiny-opt", "activation_function", "gelu_new"),
        ("tiny-falcon", "activation", None),
        ("tiny-falcon", "activation", "gelu_new"),
    ],
)
def test_an_mlp_keeps_what_its_activation_needs(name: str, field: str, value: str | None) -> None:
    """None: the config does not say, and transformers decides."""
    config = read_config(name)
    config.pop(field, None)
    other = {**config, field: "gelu"}
    config |= {field: value} if value else {}
    assert planned(config) - planned(other) == kept(config) - kept(other)


def test_one_head_of_keys_that_falcon_shares_is_copied_and_its_scores_kept() -> None:
    config = read_config("tiny-falcon", hidden_size=64)
    batch, seq_len = _TOKENS.shape
    run = Training(policy=POLICIES["fp32"], microbatch=batch, seq_len=seq_len)
    scores = sum(scores_nbytes(work, run)[0] // 4 for work in model_shape(config).work.values())
    assert scores == config["num_hidden_layers"] * config["num_attention_heads"] * seq_len
    assert planned(config) + _TOKENS.numel() * scores == pytest.approx(kept(config), rel=0.03)


@pytest.mark.parametrize("name", ["tiny-gemma2", "tiny-gemma3"])
@pytest.mark.parametrize("changes", [{}, {"final_logit_softcapping": 20.0}])
def test_capped_logits_keep_their_tanh(name: str, changes: dict[str, float]) -> None:
    config, other = read_config(name, **changes), read_config(name, final_logit_softcapping=None)
    difference = kept(config) - kept(other)
    assert planned(config) - planned(other) == difference
    assert bool(difference) is (bool(changes) or name == "tiny-gemma2")


def test_capped_logits_of_the_catalogue_keep_their_tanh() -> None:
    config, stored = stored_by("Gemma3nForCausalLM")
    section = config.get("text_config", config)
    heads = []
    for value in (None, 30.0):
        section["final_logit_softcapping"] = value
        shape = model_shape(config, stored=stored)
        heads.append(shape.work[shape.modules[-1]].saved)
    assert heads[1] - heads[0] == section["vocab_size"]


# After both halves of a layer, and of whole queries and keys; four; of each head, by two names.
@pytest.mark.parametrize(
    "architecture", ["Olmo2ForCausalLM", "Glm4ForCausalLM", "Exaone4ForCausalLM", "HunYuanDenseV1ForCausalLM"]
)
def test_norms_of_the_catalogue_are_as_many_as_files_have(architecture: str) -> None:
    config, stored = stored_by(architecture)
    with quiet():
        model = getattr(transformers, architecture)(config_of(architecture))
    work = model_shape(config, stored=stored).work.values()
    planned = _TOKENS.numel() * sum(of_module.saved + of_module.saved_fp32 for of_module in work)
    assert 0.95 < planned / kept(config, model) < 1.1


# What no matrix or norm in files shows: norms without weights, several hidden states, rotations by complex numbers, and
# keys that are repeated for heads that are too wide to share them.
@pytest.mark.parametrize("architecture", ["Gemma3nForCausalLM", "Gemma4ForCausalLM", "Llama4ForCausalLM"])
def test_plans_are_not_lower_than_what_autograd_keeps(architecture: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32}
    config, stored = stored_by(architecture, **sizes)
    with quiet():
        model = getattr(transformers, architecture)(config_of(architecture, **sizes))
    work = model_shape(config, stored=stored).work.values()
    planned = _TOKENS.numel() * sum(of_module.saved + of_module.saved_fp32 for of_module in work)
    assert 0.9 < planned / kept(config, model) < 1.15


def planned_masks(shape: ModelShape) -> int:
    batch, seq_len = _TOKENS.shape
    run = Training(policy=POLICIES["fp32"], microbatch=batch, seq_len=seq_len, host_memory="fast")
    of_layers = (masked_elements(work, run, shape.windows.get(module, 0)) for module, work in shape.work.items())
    return _TOKENS.numel() * sum(of_layers)


_QWEN = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention"]}


# Windows of all layers, of all but each second one, and of those that the config lists; none in several operations.
@pytest.mark.parametrize(
    ("name", "changes"),
    [("tiny-mistral", {}), ("tiny-phi3", {}), ("tiny-gemma3", {}), ("tiny-qwen2", _QWEN), ("tiny-gemma2", {})],
)
@pytest.mark.parametrize("window", [4, 8])
def test_layers_whose_window_is_no_longer_than_a_row_keep_a_mask(
    name: str, changes: dict[str, Any], window: int
) -> None:
    config = read_config(name, **changes, sliding_window=window)
    config["num_hidden_layers"] = len(changes.get("layer_types", "")) or config["num_hidden_layers"]
    wider = {**config, "sliding_window": 9}
    masks = planned_masks(model_shape(config))
    assert masks == kept(config) - kept(wider)
    assert planned_masks(model_shape(wider)) == 0
    assert bool(masks) is (name != "tiny-gemma2")


@pytest.mark.parametrize(
    ("architecture", "field", "has_types"),
    [
        ("Cohere2ForCausalLM", "sliding_window", True),
        ("Cohere2ForCausalLM", "sliding_window", False),
        ("Llama4ForCausalLM", "attention_chunk_size", True),
        ("Llama4ForCausalLM", "attention_chunk_size", False),
        ("Olmo3ForCausalLM", "sliding_window", True),
        ("Starcoder2ForCausalLM", "sliding_window", False),
    ],
)
def test_windows_of_the_catalogue_are_kept_as_masks(architecture: str, field: str, has_types: bool) -> None:
    """Configs of older transformers list no types of layers."""
    masks = []
    for window in (4, 9):
        config, stored = stored_by(architecture, **{field: window})
        with quiet():
            model = getattr(transformers, architecture)(config_of(architecture, **{field: window}))
        if not has_types:
            config.pop("layer_types", None)
        masks.append((planned_masks(model_shape(config, stored=stored)), kept(config, model)))
    (planned, with_mask), (none, without) = masks
    assert planned == with_mask - without > 0
    assert none == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": None},
        {"sliding_window": True},
        {"sliding_window": -1},
        {"sliding_window": "4"},
        {"sliding_window": 4, "layer_types": ["full_attention", 5]},
        {"sliding_window": 4, "use_sliding_window": False},
        {"sliding_window": 4, "sliding_window_pattern": "LLLG"},
    ],
)
def test_what_no_window_can_have_is_passed_over(fields: dict[str, Any]) -> None:
    assert not model_shape(read_config("tiny-mistral", **fields)).windows
