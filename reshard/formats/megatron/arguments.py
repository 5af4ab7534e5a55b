"""The arguments that Megatron-LM saves beside the weights, and the config.json of the same model.

`arguments_of` says what a config is in Megatron's words. An export writes it, and a checkpoint's arguments must agree:
some of them change what weights mean, and leave no trace in their shapes.

Source: Megatron-LM core_v0.16, megatron/training/arguments.py and checkpointing.py; megatron-core 0.16.1,
transformer/transformer_config.py, transformer/multi_latent_attention.py, transformer/moe/moe_utils.py and
models/common/embeddings; transformers 5.23, models/deepseek_v3 and modeling_rope_utils.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from manifests.errors import ModelError, SourceError
from manifests.models import ConfigReader
from manifests.models.config import MAX_LAYERS
from reshard.formats.megatron.names import megatron_names

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
_USE_OWN, _CONVERT = "use the config.json of this model", "convert it with Megatron-Bridge, if it knows this model"
# What no config of these families says: the values with which a model computes as transformers does.
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "rotary_seq_len_interpolation_factor": (None, 1), "rotary_base_per_layer": (None,), "no_rope_freq": (None,),
    "softmax_scale": (None,), "softmax_type": (None, "vanilla"), "glu_linear_offset": (None, 0),
    "activation_func_clamp_value": (None,), "moe_apply_probs_on_input": (None, False),
    "moe_mlp_glu_interleave_size": (None,), "moe_shared_expert_glu_interleave_size": (None,),
    "use_grouped_gemm_for_dense_mlp": (None, False), "use_mup": (None, False),
}  # fmt: skip


def check_arguments(
    arguments: Mapping[str, Any],
    config: Mapping[str, Any],
    num_rows: int,
    common: str,
    where: str,
    *,
    is_made: bool = False,
) -> None:
    """Raise unless a config describes the model that these arguments do; `num_rows` are those of the embedding.

    `common` is the place of the arguments, and `where` that of the config, unless it `is_made` of them.
    """
    expected = arguments_of(config, where)
    place = f"{common}: args"
    for name in _REQUIRED:
        if name not in arguments:
            raise _other_model(f"{place}.{name}", "no such argument")
    for name, value in expected.items():
        if name in arguments and not _is_same(name, value, arguments[name], expected):
            origin, hint = (f" (as in {config['model_type']})", _CONVERT) if is_made else (" (config.json)", _USE_OWN)
            problem = f"expected {value}{origin}, found {str(arguments[name])[:80]}"
            raise _other_model(f"{place}.{name}", problem, hint)
    for name, values in _WITHOUT_EFFECT.items():
        if (value := arguments.get(name)) not in values:
            problem = f"expected {values[-1]}, as transformers computes, found {str(value)[:80]}"
            raise _other_model(f"{place}.{name}", problem, _CONVERT)
    _check_vocabulary(arguments, config["vocab_size"], num_rows, place)


def arguments_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments of Megatron-LM that describe the model of a config."""
    megatron_names(config, where)
    read = ConfigFields(config, where)
    count, kind = read.typed.count, config["model_type"]
    heads, width = count("num_attention_heads"), count("hidden_size")
    groups = count("num_key_value_heads", heads)
    read.expect("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        read.expect(name, False)
    arguments: dict[str, Any] = {
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
    return arguments | _experts(read) | (deepseek_arguments(read) if kind == "deepseek_v3" else _rotary(read))


def config_of(arguments: Mapping[str, Any], dtype: str, common: str) -> dict[str, Any]:
    """Return the config of the model that arguments, of the place `common`, describe; `dtype` is of its weights."""
    try:
        config = _config_of(arguments)
        json.dumps(config, allow_nan=False)  # arguments may be of any type
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        problem = f"expected arguments that describe a model: {type(error).__name__} {error}"[:200]
        hint = "copy the config.json of the Hugging Face model into the folder"
        raise SourceError(f"{common}: args", problem, hint, code="source.megatron-arguments") from error
    kind = config["model_type"]
    return {"architectures": [_ARCHITECTURES[kind]], **config, "dtype": _DTYPES.get(dtype, "float32")}


def _rotary(read: ConfigFields) -> dict[str, Any]:
    rope = read.rope()
    arguments: dict[str, Any] = {"rotary_base": rope.base, "use_rope_scaling": False}
    if rope.kind == "default":
        return arguments
    expected = "default rotary embeddings, or Llama 3.1's"
    if rope.kind != "llama3":
        raise read.refuse("rope_parameters", expected, dict(rope.fields))
    fields = {"factor": rope.fields.get("factor") or "of any value", **_LLAMA3}
    others = {name: rope.fields.get(name) for name, value in fields.items() if rope.fields.get(name) != value}
    if others:
        needed, values = (", ".join(f"{name} {of[name]}" for name in others) for of in (fields, others))
        raise read.refuse("rope_parameters", f"{expected} with {needed}", values)
    return arguments | {"use_rope_scaling": True, "rope_scaling_factor": fields["factor"]}


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Return the number of experts of a layer, which configs name differently; 0 if there are none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((config[name] for name in names if config.get(name)), 0)
    assert isinstance(count, int), "model_shape checked it"
    return count


def layers_with_experts(config: Mapping[str, Any], where: str) -> list[int]:
    """Return 1 for each decoder layer with experts and 0 for each without."""
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


def _is_same(name: str, expected: Any, actual: Any, all_expected: Mapping[str, Any]) -> bool:
    """Return whether an argument is the expected one, in any of the ways in which Megatron-LM spells it."""
    match name:
        case "num_query_groups" if not all_expected["group_query_attention"]:
            return actual in (None, 1, expected)  # not looked at
        case "moe_layer_freq":
            num_layers = all_expected["num_layers"]
            return _pattern(actual, num_layers) == _pattern(expected, num_layers)
        case "moe_router_topk_scaling_factor" | "moe_router_num_groups" | "moe_router_group_topk":
            return bool((actual or 1) == (expected or 1))
        case "mtp_num_layers":
            return actual in range((expected or 0) + 1) or actual is None  # without some, as files may be
        case "kv_channels" if all_expected["multi_latent_attention"]:
            return True  # not looked at
        case "moe_router_pre_softmax" if all_expected["moe_router_score_function"] == "sigmoid":
            return True
    return bool(actual == expected) or (expected in (None, False) and actual in (None, False))


def _pattern(freq: Any, num_layers: int) -> list[int] | None:
    """Return which layers have experts: all, every n-th, or those of a list."""
    if type(freq) is int and freq > 0:
        return [int(index % freq == 0) for index in range(num_layers)]
    return list(freq) if isinstance(freq, list | tuple) else None


def _check_vocabulary(arguments: Mapping[str, Any], vocab: int, num_rows: int, place: str) -> None:
    """Raise unless the embedding has the rows of the config's vocabulary, and others only as padding."""
    padded, tokens = arguments.get("padded_vocab_size"), arguments.get("vocab_size")
    sizes = (arguments.get(name) for name in ("make_vocab_size_divisible_by", "tensor_model_parallel_size"))
    multiple = prod(size for size in sizes if isinstance(size, int) and size > 0)
    if isinstance(tokens, int) and tokens > vocab:
        problem = f"expected at most {vocab} (config.json), found {tokens}: weights of tokens would be lost"
        raise _other_model(f"{place}.vocab_size", problem)
    if isinstance(padded, int) and padded != num_rows:
        raise _other_model(f"{place}.padded_vocab_size", f"expected {num_rows} (rows of the embedding), found {padded}")
    if num_rows < vocab:
        hint = f"set vocab_size in config.json to {num_rows}, or leave that file out"
        problem = f"expected at least {vocab} rows of the embedding (config.json), found {num_rows}"
        raise _other_model(f"{place}.padded_vocab_size", problem, hint)
    if not isinstance(tokens, int) and num_rows - vocab >= multiple:
        problem = (
            f"expected fewer than {multiple} rows of padding, found {num_rows} rows for {vocab} tokens (config.json)"
        )
        raise _other_model(f"{place}.make_vocab_size_divisible_by", problem)


def _other_model(where: str, problem: str, hint: str = _USE_OWN) -> SourceError:
    return SourceError(where, problem, hint, code="source.megatron-arguments")


def _config_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    heads, num_layers = arguments["num_attention_heads"], arguments["num_layers"]
    if type(num_layers) is not int or not 0 < num_layers <= MAX_LAYERS:
        raise ValueError(f"num_layers {num_layers!r:.80}")
    num_experts = arguments.get("num_experts")
    has_norms = bool(arguments.get("qk_layernorm"))
    config: dict[str, Any] = {
        "hidden_size": arguments["hidden_size"], "intermediate_size": arguments["ffn_hidden_size"],
        "num_hidden_layers": num_layers, "num_attention_heads": heads, "hidden_act": "silu",
        "rms_norm_eps": arguments["norm_epsilon"], "vocab_size": _num_tokens(arguments),
        "max_position_embeddings": arguments["max_position_embeddings"],
        "tie_word_embeddings": not arguments["untie_embeddings_and_output_weights"], "attention_bias": False,
    }  # fmt: skip
    grouped = bool(arguments.get("group_query_attention")) and arguments["num_query_groups"]
    config |= {
        "num_key_value_heads": grouped or heads,
        "head_dim": arguments.get("kv_channels") or arguments["hidden_size"] // heads,
        "rope_theta": arguments["rotary_base"],
    }
    if arguments.get("use_rope_scaling"):
        config["rope_scaling"] = {"rope_type": "llama3", "factor": arguments["rope_scaling_factor"], **_LLAMA3}
    if not num_experts:
        return {"model_type": "qwen3" if has_norms else "llama", **config}
    freq = _pattern(arguments.get("moe_layer_freq", 1), num_layers) or []
    if arguments.get("multi_latent_attention"):
        return {"model_type": "deepseek_v3", **config, **deepseek_config(arguments, freq)}
    return {
        "model_type": "qwen3_moe", **config, "num_experts": num_experts,
        "num_experts_per_tok": arguments["moe_router_topk"], "decoder_sparse_step": 1,
        "moe_intermediate_size": arguments.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"],
        "mlp_only_layers": [index for index, sparse in enumerate(freq) if not sparse],
        "norm_topk_prob": not arguments.get("moe_router_pre_softmax", False),
    }  # fmt: skip


def _num_tokens(arguments: Mapping[str, Any]) -> Any:
    """Return the rows of the embedding without those that pad it, as far as arguments say how many those are."""
    size, padded = arguments.get("vocab_size"), arguments.get("padded_vocab_size")
    if size and str(arguments.get("tokenizer_type")).startswith("Null"):
        return min(size + 1, padded or size + 1)  # EOD comes after the tokens that `size` counts
    return size or arguments["padded_vocab_size"]


_LATENT_DEFAULTS: Mapping[str, Any] = {
    "rope_type": "yarn", "rotary_scaling_factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0, "moe_shared_expert_gate": False,
}  # fmt: skip
_YARN = {  # of Megatron, and of transformers
    "rotary_scaling_factor": "factor", "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast", "beta_slow": "beta_slow", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
}  # fmt: skip
_SCORED = 2  # experts of a group whose scores rate it


def with_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model with latent attention, with Megatron's defaults where they leave one out.

    YaRN that scales by 1 is plain rotary embeddings.
    """
    filled = {**arguments, **{name: value for name, value in _LATENT_DEFAULTS.items() if arguments.get(name) is None}}
    if filled["rotary_scaling_factor"] == 1:
        filled |= {"rope_type": "rope", "mscale_all_dim": 0.0}
    return filled


def deepseek_arguments(read: ConfigFields) -> dict[str, Any]:
    """Return the arguments in which DeepSeek-V3 differs from models without latent attention."""
    config, count = read.config, read.typed.count
    per_token, groups, chosen = count("num_experts_per_tok"), count("n_group", 8), count("topk_group", 4)
    read.expect("rope_interleave", True)
    read.expect("scoring_func", "sigmoid")
    read.expect("norm_topk_prob", per_token > 1)
    read.expect("rms_norm_eps", 1e-6)  # transformers has it in the norms of latents, whatever the field says
    read.expect("num_key_value_heads", count("num_attention_heads"))
    if chosen < groups and per_token // chosen != _SCORED:
        raise read.refuse("topk_group", f"{per_token} / {_SCORED} groups for each token", chosen)
    return {
        "multi_latent_attention": True, "kv_channels": count("v_head_dim"), "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": count("kv_lora_rank"), "qk_head_dim": count("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": count("qk_rope_head_dim"), "v_head_dim": count("v_head_dim"),
        "mtp_num_layers": config.get("num_nextn_predict_layers"),
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 2.5),
        "moe_router_num_groups": groups if chosen < groups else None,
        "moe_router_group_topk": chosen if chosen < groups else None,
        "moe_shared_expert_intermediate_size": count("moe_intermediate_size") * count("n_shared_experts"),
        "moe_shared_expert_gate": False,
        **_rotary_or_yarn(read),
    }  # fmt: skip


def deepseek_config(arguments: Mapping[str, Any], has_experts: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a config that `with_defaults` arguments describe, beside those of every model."""
    width = arguments["moe_ffn_hidden_size"]
    groups = arguments.get("moe_router_num_groups") or 1
    config = {
        "num_key_value_heads": arguments["num_attention_heads"], "head_dim": arguments["qk_pos_emb_head_dim"],
        "q_lora_rank": arguments["q_lora_rank"], "kv_lora_rank": arguments["kv_lora_rank"],
        "qk_nope_head_dim": arguments["qk_head_dim"], "qk_rope_head_dim": arguments["qk_pos_emb_head_dim"],
        "v_head_dim": arguments["v_head_dim"], "rope_interleave": True,
        "first_k_dense_replace": [*has_experts].index(1), "moe_intermediate_size": width,
        "n_routed_experts": arguments["num_experts"],
        "n_shared_experts": arguments["moe_shared_expert_intermediate_size"] // width,
        "num_experts_per_tok": arguments["moe_router_topk"], "n_group": groups,
        "topk_group": arguments.get("moe_router_group_topk") or groups, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": arguments["moe_router_topk"] > 1,
        "routed_scaling_factor": arguments.get("moe_router_topk_scaling_factor") or 1.0,
        "num_nextn_predict_layers": arguments.get("mtp_num_layers") or 0,
    }  # fmt: skip
    if arguments["rope_type"] == "yarn":
        config["rope_scaling"] = {"rope_type": "yarn", **{theirs: arguments[name] for name, theirs in _YARN.items()}}
    return config


def _rotary_or_yarn(read: ConfigFields) -> dict[str, Any]:
    rope = read.rope()
    arguments: dict[str, Any] = {"rotary_base": rope.base, "use_rope_scaling": False}
    if rope.kind == "default":
        return arguments | {"rope_type": "rope", "mscale_all_dim": 0.0}
    fields = {name: rope.fields.get(name) for name in _YARN.values()}
    scale, all_dim = fields["mscale"], fields["mscale_all_dim"]
    expressible = rope.fields.get("attention_factor") is None and rope.fields.get("truncate", True)
    expressible = expressible and fields["factor"] and fields["original_max_position_embeddings"]
    if rope.kind != "yarn" or not expressible or (all_dim and not scale):
        raise read.refuse("rope_parameters", "default rotary embeddings, or DeepSeek-V3's YaRN", dict(rope.fields))
    # Without mscale_all_dim, transformers does not look at mscale.
    fields |= {"mscale": scale if all_dim else 1.0, "mscale_all_dim": all_dim or 0.0}
    yarn = {name: fields[theirs] or _LATENT_DEFAULTS[name] for name, theirs in _YARN.items()}
    return arguments | {"rope_type": "yarn", **yarn}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings: their type and base, and the other fields that a config has of them."""

    kind: str
    base: float
    fields: Mapping[str, Any]


class ConfigFields:
    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where
        self.typed = ConfigReader(config, f"{where}: config.json")

    def expect(self, name: str, allowed: object) -> None:
        """Raise unless a field is absent, or has the one value that Megatron's models compute."""
        value = self.config.get(name, allowed)
        if value != allowed:
            raise self.refuse(name, allowed, value)

    def refuse(self, name: str, allowed: object, value: object) -> ModelError:
        problem = f"Megatron-Core's model expects {allowed}, found {str(value)[:80]}"
        return ModelError(f"{self.where}: config.json: {name}", problem, _CONVERT, code="model.not-in-megatron")

    def rope(self) -> Rope:
        """Return the rotary embeddings, which transformers 5 has in `rope_parameters`, 4 in two fields."""
        sections = map(self.typed.section, ("rope_parameters", "rope_scaling"))
        filled = (section.config for section in sections if section is not None and section.config)
        fields: Mapping[str, Any] = next(filled, {})
        kind = fields.get("rope_type") or fields.get("type") or "default"
        return Rope(kind, fields.get("rope_theta") or self.config.get("rope_theta") or 10000.0, fields)
