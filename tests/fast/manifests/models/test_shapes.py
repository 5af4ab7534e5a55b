"""Every family's tensors, held against the files that transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manifests.models import ARCHITECTURES, model_shape, module_of
from tests.fast.manifests.models.built import DECODERS, TINY, build, read_config, saved_tensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in TINY),
    *((name, {"tie_word_embeddings": True}) for name in TINY),
    ("tiny-mistral", {"head_dim": 12}),
    ("tiny-qwen3", {"attention_bias": True}),
    ("tiny-qwen3-moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "attention_bias": True}),
    ("tiny-qwen3-moe", {"num_experts": None, "num_local_experts": 4, "mlp_only_layers": None}),
    ("tiny-deepseek-v3", {"q_lora_rank": None, "attention_bias": True}),
    ("tiny-deepseek-v3", {"first_k_dense_replace": 0, "n_shared_experts": 2, "attention_bias": True}),
    ("tiny-deepseek-v3", {"first_k_dense_replace": 9}),
    ("tiny-gpt-oss", {"attention_bias": False}),
)


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_tensors_are_those_that_transformers_saves(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    asked = {key: value for key, value in read_config(name, **changes).items() if value is not None}
    asked |= {key: None for key in ("q_lora_rank",) if key in changes}
    model = build(asked)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    shape, saved = model_shape(config), saved_tensors(tmp_path)
    tied = bool(changes.get("tie_word_embeddings"))
    assert saved == {fqn: dims for fqn, dims in shape.tensors.items() if not (tied and fqn == HEAD)}
    assert shape.ties == (((EMBEDDING, HEAD),) if tied else ())
    assert shape.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert model_shape(asked).tensors == shape.tensors


@pytest.mark.parametrize("name", TINY)
def test_modules_hold_every_tensor_in_the_order_they_run(name: str) -> None:
    shape = model_shape(read_config(name))
    layers = [f"model.layers.{index}" for index in range(4)]
    assert shape.modules == ("model.embed_tokens", *layers, "model.norm", "lm_head")
    assert (shape.num_layers, shape.hidden_size, shape.optional) == (4, 32, frozenset())
    by_module = shape.by_module()
    assert list(by_module) == list(shape.modules) == list(shape.work)
    assert [fqn for fqns in by_module.values() for fqn in fqns] == list(shape.tensors)
    assert all(module_of(fqn, shape.modules) == module for module, fqns in by_module.items() for fqn in fqns)


def test_every_architecture_has_a_tiny_config() -> None:
    found = {read_config(name)["architectures"][0] for name in (*TINY, *DECODERS)}
    assert found == ARCHITECTURES.keys() - {"MPTForCausalLM"}  # MosaicML's own name for MptForCausalLM


def test_mtp_layers_follow_the_decoders_with_embedding_and_head_of_their_own() -> None:
    from transformers.modeling_layers import MtpModel

    config = read_config("tiny-deepseek-v3", num_nextn_predict_layers=2)
    shape = model_shape(config)
    layers = [f"model.layers.{index}" for index in range(6)]
    assert shape.modules == ("model.embed_tokens", *layers, "model.norm", "lm_head")
    assert shape.num_layers == 4
    assert shape.optional == {"model.layers.4", "model.layers.5"}

    decoder = below("model.layers.3", shape.tensors)
    expected = {leaf: dims for leaf, dims in decoder.items() if ".experts." in leaf}  # one tensor in transformers
    for name, tensor in MtpModel(build(config), 1).state_dict().items():
        leaf = name.removeprefix("layers.0.").removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if ".experts." not in leaf:
            expected[leaf.replace("shared_head.weight", "shared_head.head.weight")] = tuple(tensor.shape)
    assert below("model.layers.4", shape.tensors) == below("model.layers.5", shape.tensors) == expected


def test_checkpoint_without_its_mtp_layers_is_the_same_model_less_those() -> None:
    plain = model_shape(read_config("tiny-deepseek-v3"))
    whole = model_shape(read_config("tiny-deepseek-v3", num_nextn_predict_layers=2))
    less = whole.without(whole.optional)
    assert (less.modules, less.tensors, less.work, less.optional) == (
        plain.modules, plain.tensors, plain.work, frozenset(),
    )  # fmt: skip
    assert less.num_params == plain.num_params
    assert whole.without(()) == whole
    assert whole.without({"model.layers.5"}).modules == (*whole.modules[:6], "model.norm", "lm_head")


def below(module: str, tensors: Any) -> dict[str, tuple[int, ...]]:
    prefix = f"{module}."
    return {fqn.removeprefix(prefix): dims for fqn, dims in tensors.items() if fqn.startswith(prefix)}
