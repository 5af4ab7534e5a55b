"""The arguments that Megatron-LM saves in `common.pt`, and the config.json of the same model.

`arguments_of` says what a config is in Megatron's words. An export writes it, and a checkpoint's arguments must agree:
some of them change what weights mean, and leave no trace in their shapes.

Source: Megatron-LM core_v0.16, megatron/training/arguments.py and checkpointing.py; megatron-core 0.16.1,
transformer/transformer_config.py and models/common/embeddings/rotary_pos_embedding.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from manifests.errors import SourceError
from manifests.models.config import MAX_LAYERS
from reshard.archives.tensors import read_object
from reshard.formats.megatron.deepseek import deepseek_arguments, deepseek_config, with_defaults
from reshard.formats.megatron.fields import ConfigFields
from reshard.formats.megatron.names import megatron_names
from stores.base import Folder

COMMON_NAME = "common.pt"
_VERSION = 3.0  # of the order of rows of query_key_value
_ITERATION = re.compile(r"iter_(\d{1,12})")
_ALIASES = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts"}  # in other releases
# A checkpoint that lacks one of these is refused: nothing else says it. The rest are of newer releases or other models.
_REQUIRED = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "swiglu", "normalization", "norm_epsilon",
    "position_embedding_type", "rotary_base", "untie_embeddings_and_output_weights", "add_bias_linear",
)  # fmt: skip
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # Megatron's own
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_common(folder: Folder) -> Mapping[object, object]:
    """Return what a checkpoint's `common.pt` has.

    `content_metadata` says how ranks sharded, which names and chunks say too, and how state was gathered.

    Raises:
        SourceError: there is no such file, or it is damaged, or no dict, or is of another version or iteration.
        InputError: it cannot be read.
    """
    if COMMON_NAME not in folder.names():
        raise _no_arguments(f"{folder}/{COMMON_NAME}", "no such file")
    common = read_object(folder.file(COMMON_NAME), COMMON_NAME)
    if not isinstance(common, dict):
        raise _no_arguments(f"{folder}/{COMMON_NAME}", f"found a {type(common).__name__}")
    if (version := common.get("checkpoint_version", _VERSION)) != _VERSION:
        problem = f"expected {_VERSION}, found {str(version)[:80]}: rows of query_key_value may have another order"
        hint = "load it in Megatron-LM and save it again"
        place = f"{folder}/{COMMON_NAME}: checkpoint_version"
        raise SourceError(place, problem, hint, code="source.megatron-format")
    name = folder.location.rstrip("/").rpartition("/")[2]
    if (match := _ITERATION.fullmatch(name)) and common.get("iteration", int(match[1])) != int(match[1]):
        problem = f"expected {int(match[1])} ({name}), found {str(common['iteration'])[:80]}"
        hint = "the folder was renamed or copied: rename it back, or name the folder of the iteration that you want"
        raise SourceError(f"{folder}/{COMMON_NAME}: iteration", problem, hint, code="source.other-iteration")
    return common


def arguments_in(common: Mapping[object, object], where: str) -> dict[str, Any]:
    """Return the arguments that a `common.pt` has, by name.

    Raises:
        SourceError: it has none.
    """
    fields = getattr(common.get("args"), "fields", None)
    if not isinstance(fields, dict) or not fields:
        raise _no_arguments(f"{where}/{COMMON_NAME}", "found no 'args'")
    found = {name: value for name, value in fields.items() if isinstance(name, str)}
    for name, alias in _ALIASES.items():
        if name not in found and alias in found:
            found[name] = found[alias]
    return with_defaults(found) if found.get("multi_latent_attention") else found


def _no_arguments(where: str, found: str) -> SourceError:
    problem = f"expected the arguments of Megatron-LM, which say what the weights mean, {found}"
    hint = "convert it with Megatron-Bridge's AutoBridge.export_ckpt"
    return SourceError(where, problem, hint, code="source.no-megatron-arguments")


def check_arguments(arguments: Mapping[str, Any], config: Mapping[str, Any], num_rows: int, where: str) -> None:
    """Raise unless a config describes the model that these arguments do; `num_rows` are those of the embedding.

    Raises:
        SourceError: one differs, or is missing.
        ModelError: Megatron-Core has no such model.
    """
    expected = arguments_of(config, where)
    place, hint = f"{where}/{COMMON_NAME}: args", "use the config.json of this model"
    for name in _REQUIRED:
        if name not in arguments:
            raise SourceError(f"{place}.{name}", "no such argument", hint, code="source.megatron-arguments")
    for name, value in expected.items():
        if name in arguments and not _is_same(name, value, arguments[name], expected):
            problem = f"expected {value} (config.json), found {str(arguments[name])[:80]}"
            raise SourceError(f"{place}.{name}", problem, hint, code="source.megatron-arguments")
    _check_vocabulary(arguments, config["vocab_size"], num_rows, place)


def arguments_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments of Megatron-LM that describe the model of a config.

    Raises:
        ModelError: a config of a model that Megatron-Core does not have.
        InputError: a field of it is malformed.
    """
    megatron_names(config, where)
    read = ConfigFields(config, where)
    count, kind = read.typed.count, config["model_type"]
    heads, width = count("num_attention_heads"), count("hidden_size")
    groups = count("num_key_value_heads", heads)
    read.expect("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        read.expect(name, False)
    found: dict[str, Any] = {
        "num_layers": count("num_hidden_layers"), "hidden_size": width, "num_attention_heads": heads,
        "ffn_hidden_size": count("intermediate_size"), "swiglu": True, "squared_relu": False, "quick_geglu": False,
        "normalization": "RMSNorm", "norm_epsilon": config.get("rms_norm_eps", 1e-6), "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False, "add_bias_linear": False, "add_qkv_bias": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False), "qk_l2_norm": False,
        "qk_layernorm": kind != "llama", "position_embedding_type": "rope", "rotary_percent": 1.0,
        "rotary_interleaved": False, "attention_output_gate": False, "multi_latent_attention": False,
        "mtp_num_layers": None,
        "group_query_attention": groups != heads, "num_query_groups": groups,
        "kv_channels": count("head_dim", 128 if kind == "qwen3" else width // heads),
        "window_size": None, "heterogeneous_layers_config_path": None,
    }  # fmt: skip
    return found | _experts(read) | (deepseek_arguments(read) if kind == "deepseek_v3" else _rotary(read))


def config_of(arguments: Mapping[str, Any], dtype: str, where: str) -> dict[str, Any]:
    """Return the config of the model that arguments describe; `dtype` is that of its weights.

    Raises:
        SourceError: an argument is missing, or of a model that no known architecture is.
    """
    try:
        found = _config_of(arguments)
        json.dumps(found, allow_nan=False)  # arguments may be of any type
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        problem = f"expected arguments that describe a model: {type(error).__name__} {error}"[:200]
        hint = "copy the config.json of the Hugging Face model into the folder"
        raise SourceError(f"{where}/{COMMON_NAME}: args", problem, hint, code="source.megatron-arguments") from error
    kind = found["model_type"]
    return {"architectures": [_ARCHITECTURES[kind]], **found, "dtype": _DTYPES.get(dtype, "float32")}


def _rotary(read: ConfigFields) -> dict[str, Any]:
    rope = read.rope()
    found: dict[str, Any] = {"rotary_base": rope.base, "use_rope_scaling": False}
    if rope.kind == "default":
        return found
    if (
        rope.kind == "llama3"
        and rope.fields.get("factor")
        and all(rope.fields.get(name) == value for name, value in _LLAMA3.items())
    ):
        return found | {"use_rope_scaling": True, "rope_scaling_factor": rope.fields["factor"]}
    raise read.refuse("rope_parameters", "default rotary embeddings, or Llama 3.1's", dict(rope.fields))


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Return the number of experts of a layer, which configs name differently; 0 if there are none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = next((config[name] for name in names if config.get(name)), 0)
    assert isinstance(found, int), "model_shape checked it"
    return found


def layers_with_experts(config: Mapping[str, Any], where: str) -> list[int]:
    """Return 1 for each decoder layer with experts and 0 for each without.

    Raises:
        InputError: a field of the config is malformed.
    """
    read = ConfigFields(config, where).typed
    layers = range(read.count("num_hidden_layers", most=MAX_LAYERS))
    if config["model_type"] == "deepseek_v3":
        num_dense = read.count("first_k_dense_replace", least=0)
        return [int(layer >= num_dense) for layer in layers]
    step, dense = read.count("decoder_sparse_step", 1), set(read.counts("mlp_only_layers"))
    return [int(bool(num_experts_of(config)) and layer not in dense and (layer + 1) % step == 0) for layer in layers]


def _experts(read: ConfigFields) -> dict[str, Any]:
    config, count = read.config, read.typed.count
    if not num_experts_of(config):
        return {"num_experts": None}
    has_experts = layers_with_experts(config, read.where)
    return {
        "num_experts": num_experts_of(config), "moe_ffn_hidden_size": count("moe_intermediate_size"),
        "moe_router_topk": count("num_experts_per_tok"), "moe_router_score_function": "softmax",
        "moe_layer_freq": 1 if all(has_experts) else has_experts,  # with a list, Megatron-Core does not stack layers
        "moe_router_enable_expert_bias": False, "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None, "moe_router_group_topk": None,
        "moe_shared_expert_intermediate_size": None,
    }  # fmt: skip


def _is_same(name: str, expected: Any, found: Any, all_expected: Mapping[str, Any]) -> bool:
    """Return whether an argument is the expected one, in any of the ways in which Megatron-LM spells it."""
    match name:
        case "num_query_groups" if not all_expected["group_query_attention"]:
            return found in (None, 1, expected)  # not looked at
        case "moe_layer_freq":
            num_layers = all_expected["num_layers"]
            return _pattern(found, num_layers) == _pattern(expected, num_layers)
        case "moe_router_topk_scaling_factor" | "moe_router_num_groups" | "moe_router_group_topk":
            return bool((found or 1) == (expected or 1))
        case "mtp_num_layers":
            return found in range((expected or 0) + 1) or found is None  # without some, as files may be
        case "kv_channels" if all_expected["multi_latent_attention"]:
            return True  # not looked at
        case "moe_router_pre_softmax" if all_expected["moe_router_score_function"] == "sigmoid":
            return True
    return bool(found == expected) or (expected in (None, False) and found in (None, False))


def _pattern(freq: Any, num_layers: int) -> list[int] | None:
    """Return which layers have experts: all, every n-th, or those of a list."""
    if type(freq) is int and freq > 0:
        return [int(index % freq == 0) for index in range(num_layers)]
    return list(freq) if isinstance(freq, list | tuple) else None


def _check_vocabulary(arguments: Mapping[str, Any], vocab: int, num_rows: int, place: str) -> None:
    """Raise if rows beyond the config's vocabulary are more than padding."""
    padded, tokens = arguments.get("padded_vocab_size"), arguments.get("vocab_size")
    multiple = (arguments.get("make_vocab_size_divisible_by") or 1) * (arguments.get("tensor_model_parallel_size") or 1)
    hint = "use the config.json of this model"
    if isinstance(tokens, int) and tokens > vocab:
        problem = f"expected at most {vocab} (config.json), found {tokens}: weights of tokens would be lost"
        raise SourceError(f"{place}.vocab_size", problem, hint, code="source.megatron-arguments")
    if isinstance(padded, int) and padded != num_rows:
        problem = f"expected {num_rows} (rows of the embedding), found {padded}"
        raise SourceError(f"{place}.padded_vocab_size", problem, hint, code="source.megatron-arguments")
    if not isinstance(tokens, int) and num_rows - vocab >= max(multiple, 1):
        problem = (
            f"expected fewer than {multiple} rows of padding, found {num_rows} rows for {vocab} tokens (config.json)"
        )
        raise SourceError(f"{place}.make_vocab_size_divisible_by", problem, hint, code="source.megatron-arguments")


def _config_of(found: Mapping[str, Any]) -> dict[str, Any]:
    heads, num_layers = found["num_attention_heads"], found["num_layers"]
    if type(num_layers) is not int or not 0 < num_layers <= MAX_LAYERS:
        raise ValueError(f"num_layers {num_layers!r:.80}")
    num_experts = found.get("num_experts")
    has_norms = bool(found.get("qk_layernorm"))
    config: dict[str, Any] = {
        "hidden_size": found["hidden_size"], "intermediate_size": found["ffn_hidden_size"],
        "num_hidden_layers": num_layers, "num_attention_heads": heads, "hidden_act": "silu",
        "rms_norm_eps": found["norm_epsilon"], "vocab_size": found.get("vocab_size") or found["padded_vocab_size"],
        "max_position_embeddings": found["max_position_embeddings"],
        "tie_word_embeddings": not found["untie_embeddings_and_output_weights"], "attention_bias": False,
    }  # fmt: skip
    grouped = bool(found.get("group_query_attention")) and found["num_query_groups"]
    config |= {
        "num_key_value_heads": grouped or heads,
        "head_dim": found.get("kv_channels") or found["hidden_size"] // heads,
        "rope_theta": found["rotary_base"],
    }
    if found.get("use_rope_scaling"):
        config["rope_scaling"] = {"rope_type": "llama3", "factor": found["rope_scaling_factor"], **_LLAMA3}
    if not num_experts:
        return {"model_type": "qwen3" if has_norms else "llama", **config}
    freq = _pattern(found.get("moe_layer_freq", 1), num_layers) or []
    if found.get("multi_latent_attention"):
        return {"model_type": "deepseek_v3", **config, **deepseek_config(found, freq)}
    return {
        "model_type": "qwen3_moe", **config, "num_experts": num_experts,
        "num_experts_per_tok": found["moe_router_topk"], "decoder_sparse_step": 1,
        "moe_intermediate_size": found.get("moe_ffn_hidden_size") or found["ffn_hidden_size"],
        "mlp_only_layers": [index for index, sparse in enumerate(freq) if not sparse],
        "norm_topk_prob": not found.get("moe_router_pre_softmax", False),
    }  # fmt: skip
