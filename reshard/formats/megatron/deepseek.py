"""DeepSeek-V3 in the arguments of Megatron-LM: latent attention, YaRN, and experts that a token chooses by groups.

Source: megatron-core 0.16.1, transformer/transformer_config.py, transformer/multi_latent_attention.py,
transformer/moe/moe_utils.py and models/common/embeddings; transformers 5.23, models/deepseek_v3 and
modeling_rope_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.formats.megatron.fields import ConfigFields

_DEFAULTS: Mapping[str, Any] = {
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
    found = {**arguments, **{name: value for name, value in _DEFAULTS.items() if arguments.get(name) is None}}
    if found["rotary_scaling_factor"] == 1:
        found |= {"rope_type": "rope", "mscale_all_dim": 0.0}
    return found


def deepseek_arguments(read: ConfigFields) -> dict[str, Any]:
    """Return the arguments in which DeepSeek-V3 differs from models without latent attention.

    Raises:
        ModelError: a config of a model that Megatron-Core does not have.
        InputError: a field of it is malformed.
    """
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
        **_rotary(read),
    }  # fmt: skip


def deepseek_config(found: Mapping[str, Any], has_experts: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a config that `with_defaults` arguments describe, beside those of every model.

    Raises:
        KeyError, ValueError, ArithmeticError: they are not of such a model.
    """
    width = found["moe_ffn_hidden_size"]
    groups = found.get("moe_router_num_groups") or 1
    config = {
        "num_key_value_heads": found["num_attention_heads"], "head_dim": found["qk_pos_emb_head_dim"],
        "q_lora_rank": found["q_lora_rank"], "kv_lora_rank": found["kv_lora_rank"],
        "qk_nope_head_dim": found["qk_head_dim"], "qk_rope_head_dim": found["qk_pos_emb_head_dim"],
        "v_head_dim": found["v_head_dim"], "rope_interleave": True,
        "first_k_dense_replace": [*has_experts].index(1), "moe_intermediate_size": width,
        "n_routed_experts": found["num_experts"],
        "n_shared_experts": found["moe_shared_expert_intermediate_size"] // width,
        "num_experts_per_tok": found["moe_router_topk"], "n_group": groups,
        "topk_group": found.get("moe_router_group_topk") or groups, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": found["moe_router_topk"] > 1,
        "routed_scaling_factor": found.get("moe_router_topk_scaling_factor") or 1.0,
        "num_nextn_predict_layers": found.get("mtp_num_layers") or 0,
    }  # fmt: skip
    if found["rope_type"] == "yarn":
        config["rope_scaling"] = {"rope_type": "yarn", **{theirs: found[own] for own, theirs in _YARN.items()}}
    return config


def _rotary(read: ConfigFields) -> dict[str, Any]:
    rope = read.rope()
    found: dict[str, Any] = {"rotary_base": rope.base, "use_rope_scaling": False}
    if rope.kind == "default":
        return found | {"rope_type": "rope", "mscale_all_dim": 0.0}
    fields = {name: rope.fields.get(name) for name in _YARN.values()}
    scale, all_dim = fields["mscale"], fields["mscale_all_dim"]
    expressible = rope.fields.get("attention_factor") is None and rope.fields.get("truncate", True)
    expressible = expressible and fields["factor"] and fields["original_max_position_embeddings"]
    if rope.kind != "yarn" or not expressible or (all_dim and not scale):
        raise read.refuse("rope_parameters", "default rotary embeddings, or DeepSeek-V3's YaRN", dict(rope.fields))
    # Without mscale_all_dim, transformers does not look at mscale.
    fields |= {"mscale": scale if all_dim else 1.0, "mscale_all_dim": all_dim or 0.0}
    known = {own: fields[theirs] or _DEFAULTS[own] for own, theirs in _YARN.items()}
    return found | {"rope_type": "yarn", **known}
