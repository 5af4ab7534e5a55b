"""What a config promises to be on disk, held against the model that transformers builds from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manifests.errors import InputError
from manifests.models import model_shape, module_of
from tests.builders import EMBEDDING, HEAD, llama_config, llama_shapes

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
        ("lm_head", None),
        ("lm_headroom.weight", None),
        ("model.layers.2.mlp.up_proj.weight", None),
    ],
)
def test_module_of_a_tensor_is_its_longest_known_prefix(fqn: str, module: str | None) -> None:
    assert module_of(fqn, {"model", "model.layers.1", "model.layers.11", "lm_head"} - {"model"}) == module


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architectures: None is not supported\nhint: docs/models.md lists what is"),
        ({"architectures": ["OtherForCausalLM"]},
         "architectures: 'OtherForCausalLM' is not supported\nhint: docs/models.md lists what is"),
        ({"architectures": ["A", "B"]},
         "architectures: ['A', 'B'] is not supported\nhint: docs/models.md lists what is"),
        ({"architectures": {}}, "architectures: {} is not supported\nhint: docs/models.md lists what is"),
        ({"hidden_size": None}, "hidden_size: expected a positive integer, found nothing"),
        ({"hidden_size": 0}, "hidden_size: expected a positive integer, found 0"),
        ({"hidden_size": "16"}, "hidden_size: expected a positive integer, found '16'"),
        ({"vocab_size": True}, "vocab_size: expected a positive integer, found True"),
        ({"vocab_size": 32000.0}, "vocab_size: expected a positive integer, found 32000.0"),
        ({"vocab_size": 2**31}, "vocab_size: expected at most 2147483647, found 2147483648"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: expected at most 10000, found 1000000000000"),
        ({"head_dim": -1}, "head_dim: expected a positive integer, found -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads 4, found 3"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: expected a divisor of num_attention_heads 4, found 8"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false, found a string"),
        ({"attention_bias": 1}, "attention_bias: expected true or false, found a number"),
    ],
)  # fmt: skip
def test_config_that_promises_no_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        model_shape(llama_config(**changes))
    assert str(error.value) == f"config.json: {message}"
