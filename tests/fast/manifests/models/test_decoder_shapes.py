"""The decoders that train on transformers' model classes: their tensors, held against the files that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError
from manifests.models import model_shape, module_of
from tests.fast.manifests.models.built import DECODERS, TRUE_DECODERS, build, read_config, saved_tensors

HEAD = "lm_head.weight"
EMBEDDINGS = {
    "tiny-falcon": "transformer.word_embeddings",
    "tiny-gpt2": "transformer.wte",
    "tiny-mpt": "transformer.wte",
    "tiny-opt": "model.decoder.embed_tokens",
}
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in DECODERS),
    *((name, {"tie_word_embeddings": True}) for name in DECODERS),
    ("tiny-falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("tiny-falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("tiny-falcon", {"multi_query": False, "parallel_attn": False, "ffn_hidden_size": 48}),
    ("tiny-gemma2", {"attention_bias": True, "head_dim": None}),
    ("tiny-gpt2", {"n_inner": 48}),
    ("tiny-opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    ("tiny-opt", {"_remove_final_layer_norm": True, "enable_bias": False}),
    ("tiny-opt", {"layer_norm_elementwise_affine": False}),
    ("tiny-phi", {"qk_layernorm": True, "num_key_value_heads": 2}),
)


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_tensors_are_those_that_transformers_saves(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    asked = {key: value for key, value in read_config(name, **changes).items() if value is not None}
    model = build(asked)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    shape, saved = model_shape(config), saved_tensors(tmp_path)
    tied = bool(changes.get("tie_word_embeddings"))
    assert saved == {fqn: dims for fqn, dims in shape.tensors.items() if not (tied and fqn == HEAD)}
    embedding = EMBEDDINGS.get(name, "model.embed_tokens")
    assert shape.ties == (((f"{embedding}.weight", HEAD),) if tied else ())
    assert shape.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert model_shape(asked).tensors == shape.tensors


@pytest.mark.parametrize("name", DECODERS + TRUE_DECODERS)
def test_modules_hold_every_tensor_in_the_order_they_run(name: str) -> None:
    shape = model_shape(read_config(name))
    by_module = shape.by_module()
    assert list(by_module) == list(shape.modules) == list(shape.work)
    assert [fqn for fqns in by_module.values() for fqn in fqns] == list(shape.tensors)
    assert all(module_of(fqn, shape.modules) == module for module, fqns in by_module.items() for fqn in fqns)


def test_modules_go_by_the_names_of_the_model() -> None:
    assert model_shape(read_config("gpt2")).modules == (
        "transformer.wte", "transformer.wpe", *(f"transformer.h.{index}" for index in range(12)), "transformer.ln_f",
        "lm_head",
    )  # fmt: skip
    assert model_shape(read_config("opt-350m")).modules == (
        "model.decoder.embed_tokens", "model.decoder.project_in", "model.decoder.embed_positions",
        *(f"model.decoder.layers.{index}" for index in range(24)), "model.decoder.project_out", "lm_head",
    )  # fmt: skip


def test_embedding_is_tied_where_transformers_ties_it_unless_the_config_says_otherwise() -> None:
    tied = {"falcon-40b", "falcon-7b", "gemma-2-9b", "gemma-3-1b", "gpt2", "mpt-7b", "opt-125m", "opt-350m",
            "opt-6.7b", "qwen2-0.5b"}  # fmt: skip
    assert {name for name in TRUE_DECODERS if model_shape(read_config(name)).ties} == tied


def test_files_without_the_head_leave_out_a_prefix() -> None:
    shape = model_shape(read_config("gpt2"))
    assert shape.fqn_of("h.3.attn.bias") == shape.fqn_of("transformer.h.3.attn.bias") == "transformer.h.3.attn.bias"
    assert shape.fqn_of("wte.weight") == "transformer.wte.weight"
    assert [shape.fqn_of(name) for name in ("lm_head.weight", "h.12.ln_1.weight", "score.weight")] == [
        "lm_head.weight", "h.12.ln_1.weight", "score.weight",
    ]  # fmt: skip
    assert model_shape(read_config("qwen2-7b")).fqn_of("norm.weight") == "norm.weight"


@pytest.mark.parametrize(
    ("name", "changes", "where"),
    [
        ("tiny-gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("tiny-gpt2", {"n_head": 5}, "n_head"),
        ("tiny-mpt", {"no_bias": False}, "no_bias"),
        ("tiny-mpt", {"expansion_ratio": 2}, "expansion_ratio"),
        ("tiny-mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi"),
        ("tiny-mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln"),
        ("tiny-mpt", {"attn_config": {"attn_type": "multiquery_attention"}},
         "attn_config.attn_type"),
        ("tiny-mpt", {"n_heads": 5}, "n_heads"),
        ("tiny-falcon", {"apply_residual_connection_post_layernorm": True},
         "apply_residual_connection_post_layernorm"),
        ("tiny-falcon", {"new_decoder_architecture": True, "parallel_attn": False},
         "parallel_attn"),
        ("tiny-falcon", {"num_ln_in_parallel_attn": 2},
         "num_ln_in_parallel_attn"),
        ("tiny-falcon", {"num_attention_heads": 5},
         "num_attention_heads"),
        ("tiny-falcon", {"new_decoder_architecture": True, "num_kv_heads": 3},
         "num_kv_heads"),
        ("tiny-opt", {"num_attention_heads": 5}, "num_attention_heads"),
        ("tiny-phi", {"num_attention_heads": 5}, "num_attention_heads"),
        ("tiny-llama", {"num_attention_heads": 33, "num_key_value_heads": 33, "head_dim": None},
         "num_attention_heads"),
        ("tiny-phi3", {"num_key_value_heads": 3},
         "num_key_value_heads"),
    ],
)  # fmt: skip
def test_config_of_another_model_is_refused(
    name: str, changes: dict[str, Any], where: str, wording: Callable[[str], None]
) -> None:
    with pytest.raises(InputError) as error:
        model_shape(read_config(name, **changes))
    assert error.value.where == f"config.json: {where}"
    wording(f"{error.value.code}: {error.value}")
