"""Every family's tensors, held against transformers' files, and public models' published sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from manifests.models import ARCHITECTURES, model_shape, module_of
from tests.builders import HEAD, llama_config
from tests.fast.manifests.models.built import DECODERS, TINY, TRUE, TRUE_DECODERS, build, read_config, saved_tensors
from tests.refusals import refusal
from tests.steps import steps_of

EMBEDDINGS = {
    "tiny-falcon": "transformer.word_embeddings",
    "tiny-gpt2": "transformer.wte",
    "tiny-mpt": "transformer.wte",
    "tiny-opt": "model.decoder.embed_tokens",
}
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in (*TINY, *DECODERS)),
    *((name, {"tie_word_embeddings": True}) for name in (*TINY, *DECODERS)),
    ("tiny-llama", {"num_key_value_heads": None}),
    ("tiny-llama", {"num_key_value_heads": 1, "head_dim": 12}),
    ("tiny-llama", {"head_dim": None, "attention_bias": True}),
    ("tiny-llama", {"mlp_bias": True, "num_hidden_layers": 1}),
    ("tiny-mistral", {"head_dim": 12}),
    ("tiny-qwen3", {"attention_bias": True}),
    ("tiny-qwen3-moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "attention_bias": True}),
    ("tiny-qwen3-moe", {"num_experts": None, "num_local_experts": 4, "mlp_only_layers": None}),
    ("tiny-deepseek-v3", {"q_lora_rank": None, "attention_bias": True}),
    ("tiny-deepseek-v3", {"first_k_dense_replace": 0, "n_shared_experts": 2, "attention_bias": True}),
    ("tiny-deepseek-v3", {"first_k_dense_replace": 9}),
    ("tiny-gpt-oss", {"attention_bias": False}),
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
    asked |= {key: None for key in ("q_lora_rank",) if key in changes}
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


@pytest.mark.parametrize("name", [*TINY, *DECODERS, *TRUE_DECODERS])
def test_modules_hold_every_tensor_in_the_order_they_run(name: str) -> None:
    shape = model_shape(read_config(name))
    by_module = shape.by_module()
    assert list(by_module) == list(shape.modules) == list(shape.work)
    assert [fqn for fqns in by_module.values() for fqn in fqns] == list(shape.tensors)
    assert all(module_of(fqn, shape.modules) == module for module, fqns in by_module.items() for fqn in fqns)
    if name in TINY:
        layers = [f"model.layers.{index}" for index in range(4)]
        assert shape.modules == ("model.embed_tokens", *layers, "model.norm", "lm_head")
        assert (shape.num_layers, shape.hidden_size, shape.optional) == (4, 32, frozenset())


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


def test_embedding_is_tied_where_transformers_ties_it_unless_the_config_says_otherwise() -> None:
    tied = {"falcon-40b", "falcon-7b", "gemma-2-9b", "gemma-3-1b", "gpt2", "mpt-7b", "opt-125m", "opt-350m",
            "opt-6.7b", "qwen2-0.5b"}  # fmt: skip
    assert {name for name in TRUE_DECODERS if model_shape(read_config(name)).ties} == tied


@pytest.mark.parametrize("name", TRUE + TRUE_DECODERS)
def test_parameters_are_those_that_transformers_builds(name: str) -> None:
    shape = model_shape(read_config(name))
    config = {key: value for key, value in read_config(name).items() if key != "quantization_config"}
    config["architectures"] = [shape.architecture]
    model = build(config, "meta")
    assert shape.without(shape.optional).num_params == sum(parameter.numel() for parameter in model.parameters())


def test_deepseek_v3_has_the_91991_tensors_and_689_gb_of_its_index_and_is_built_in_few_steps() -> None:
    config = read_config("deepseek-v3")
    shape = model_shape(config)
    assert len(shape.tensors) == 91_991
    assert steps_of(lambda: model_shape(config)) < 5 * 91_991
    scales = {fqn for fqn in shape.tensors if fqn.endswith("_scale_inv")}
    nbytes = sum(
        prod(dims) * (4 if fqn in scales else 1 if f"{fqn}_scale_inv" in scales else 2)
        for fqn, dims in shape.tensors.items()
    )
    assert f"{nbytes / 1e9:.0f}" == "689"
    mtp = [fqn.removeprefix("model.layers.61.") for fqn in shape.tensors if fqn.startswith("model.layers.61.")]
    assert len(mtp) == 1564
    assert {
        "embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
        "shared_head.head.weight",
    } <= set(mtp)  # fmt: skip
    assert "eh_proj.weight_scale_inv" not in mtp
    assert shape.tensors["model.layers.61.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (5, 56)


def test_gpt_oss_stores_its_experts_as_blocks_and_scales() -> None:
    shape = model_shape(read_config("gpt-oss-120b"))
    layer = {
        fqn.removeprefix("model.layers.0.mlp.experts."): dims
        for fqn, dims in shape.tensors.items()
        if fqn.startswith("model.layers.0.mlp.experts.")
    }
    assert layer == {
        "gate_up_proj_bias": (128, 5760),
        "gate_up_proj_blocks": (128, 5760, 90, 16),
        "gate_up_proj_scales": (128, 5760, 90),
        "down_proj_bias": (128, 2880),
        "down_proj_blocks": (128, 2880, 90, 16),
        "down_proj_scales": (128, 2880, 90),
    }


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
    error = refusal(lambda: model_shape(read_config(name, **changes)))
    assert error.where == f"config.json: {where}"
    wording(f"{error.code}: {error}")


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


def below(module: str, tensors: Any) -> dict[str, tuple[int, ...]]:
    prefix = f"{module}."
    return {fqn.removeprefix(prefix): dims for fqn, dims in tensors.items() if fqn.startswith(prefix)}
