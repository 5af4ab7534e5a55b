"""What a config promises to be on disk, held against the model that transformers builds from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manifests.models import model_shape, module_of
from tests.builders import EMBEDDING, HEAD, llama_config, llama_shapes
from tests.refusals import refusal

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": None},
    {"num_key_value_heads": 1, "head_dim": 12},
    {"head_dim": None},
    {"attention_bias": True},
    {"mlp_bias": True, "num_hidden_layers": 1},
)


def build(config: dict[str, Any]) -> LlamaForCausalLM:
    """Build what transformers makes of a config, without weights."""
    known = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**known))


@pytest.mark.parametrize("variant", VARIANTS)
def test_llama_has_the_tensors_that_transformers_builds(variant: dict[str, Any]) -> None:
    config = llama_config(**variant)
    model, shape = build(config), model_shape(config)
    assert dict(shape.tensors) == {fqn: tuple(tensor.shape) for fqn, tensor in model.state_dict().items()}
    assert shape.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert shape.num_layers == len(model.model.layers)


@pytest.mark.parametrize("variant", VARIANTS)
def test_modules_hold_every_tensor_in_the_order_they_run(variant: dict[str, Any]) -> None:
    shape = model_shape(llama_config(**variant))
    layers = [f"model.layers.{index}" for index in range(shape.num_layers)]
    assert shape.modules == ("model.embed_tokens", *layers, "model.norm", "lm_head")
    assert {module_of(fqn, shape.modules) for fqn in shape.tensors} == set(shape.modules)


def test_tied_llama_ties_the_head_to_the_embedding() -> None:
    assert model_shape(llama_config(tie_word_embeddings=True)).ties == ((EMBEDDING, HEAD),)
    assert model_shape(llama_config(tie_word_embeddings=False)).ties == ()
    assert model_shape({k: v for k, v in llama_config().items() if k != "tie_word_embeddings"}).ties == ()


def test_builders_write_the_tensors_of_a_llama() -> None:
    config = llama_config()
    assert llama_shapes(config) == dict(model_shape(config).tensors)


@pytest.mark.parametrize(
    ("fqn", "module"),
    [
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1"),
        ("model.layers.11.mlp.up_proj.weight", "model.layers.11"),
        ("lm_head.weight", "lm_head"),
        ("lm_head", "lm_head"),  # a parameter that is a module by itself
        ("lm_headroom.weight", None),
        ("model.layers.2.mlp.up_proj.weight", None),
    ],
)
def test_module_of_a_tensor_is_its_longest_known_prefix(fqn: str, module: str | None) -> None:
    assert module_of(fqn, {"model", "model.layers.1", "model.layers.11", "lm_head"} - {"model"}) == module


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"architectures": None}, "unsupported-architecture"),
        ({"architectures": ["OtherForCausalLM"]}, "unsupported-architecture"),
        ({"architectures": ["A", "B"]}, "unsupported-architecture"),
        ({"architectures": {}}, "unsupported-architecture"),
        ({"hidden_size": None}, "invalid-field"),
        ({"hidden_size": 0}, "invalid-field"),
        ({"hidden_size": "16"}, "invalid-field"),
        ({"vocab_size": True}, "invalid-field"),
        ({"vocab_size": 32000.0}, "invalid-field"),
        ({"vocab_size": 2**31}, "too-large"),
        ({"num_hidden_layers": 10**12}, "too-large"),
        ({"head_dim": -1}, "invalid-field"),
        ({"num_key_value_heads": 3}, "inconsistent-fields"),
        ({"num_key_value_heads": 8}, "inconsistent-fields"),
        ({"tie_word_embeddings": "yes"}, "invalid-field"),
        ({"attention_bias": 1}, "invalid-field"),
    ],
)
def test_config_without_a_valid_model_is_refused(
    changes: dict[str, Any], code: str, wording: Callable[[str], None]
) -> None:
    error = refusal(lambda: model_shape(llama_config(**changes)))
    assert (error.code, error.where) == (f"config.{code}", f"config.json: {next(iter(changes))}")
    wording(str(error))
