"""A tiny config out of a real one, for the self-check: all of its layers, small widths, few heads and few experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# The largest sizes of a tiny model, by the names that configs have for them.
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_dim", "lru_width"), 64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dff", "ffn_hidden_size", "dense_intermediate_size",
         "intermediate_size_mlp"),
        96,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
         "expert_ffn_hidden_size", "shared_intermediate_size", "moe_latent_size"),
        32,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "swa_num_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "kv_n_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "rel_extent"), 128
    ),
    **dict.fromkeys(_EXPERTS, 8),
    "zero_expert_num": 8,
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_group", "num_expert_group"), 4),
    "topk_group": 2,
    **dict.fromkeys(
        ("head_dim", "swa_head_dim", "kv_channels", "linear_key_head_dim", "linear_value_head_dim",
         "linear_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_d_state", "state_size", "ssm_state_size",
         "kv_lora_rank", "q_lora_rank", "qk_head_dim", "v_head_dim", "hidden_size_per_layer_input", "index_head_dim",
         "d_rel", "global_head_dim", "o_lora_rank"),
        16,
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "n_mamba_heads", "n_groups", "mamba_n_groups", "o_groups"), 2),
    "index_n_heads": 16,  # of few, scores of several keys are 0, and whole and packed rows choose others of them
    "mamba_d_ssm": 128,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    # What a few tokens must be longer than, those of one document among others as well.
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size", "window_size",
         "local_attention", "keep_window_size", "index_topk", "chunk_size", "mamba_chunk_size", "block_size",
         "index_block_size", "heavily_compressed_attention"),
        4,
    ),
    "floor_scale": 4,
    "index_topk_blocks": 1,
}  # fmt: skip
_CONTEXT = "original_max_position_embeddings"
_SHORT, _LONG = 8, 64  # of which a few tokens are more, and fewer
_NESTED = ("attn_config", "ffn_config", "text_config")  # the other configs inside one are not of the decoder
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")  # in the tiny vocabulary: 0, 1, 2
_GROUPS = (("num_attention_heads", "num_key_value_heads"), ("swa_num_attention_heads", "swa_num_key_value_heads"))
_STATE_HEADS = (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("num_heads", "head_dim"))
_HALVES = ("short_factor", "long_factor")  # one for each pair of rotated dimensions
_SECTIONS = "mrope_section"  # which add up to these pairs


def shrink(config: Mapping[str, Any], seq_len: int = 0) -> dict[str, Any]:
    """Return a tiny config of what transformers reads in a real one, for rows that are as long as the run's.

    If those are longer than the context of the model before it was stretched, a few tokens are, too. Sizes that are
    None, 0 or smaller anyway stay, and so does what decides which code runs: whether heads share keys, which part of a
    head rotates, how widths are made up of heads.
    """
    tiny = {name: _small(str(name), value) for name, value in config.items()}
    for keep in (_keep_groups, _keep_head_width, _keep_latent, _keep_state_heads, _keep_rotation):
        keep(tiny, config)
    for before, after in ((config, tiny), *zip(_ropes(config), _ropes(tiny), strict=True)):
        _keep_context(after, before, config, tiny, seq_len)
    return tiny


def _small(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return value if name.endswith("_config") and name not in _NESTED else shrink(value)
    if name.endswith("_token_id") and value not in (None, -1):
        return _IDS.index(name) if name in _IDS else len(_IDS) - 1
    if (most := SIZES.get(name)) is None or isinstance(value, bool):
        return value
    if isinstance(value, list):  # one for each layer
        return [_small(name, entry) for entry in value]
    if not isinstance(value, int):
        return value
    # --ep is tried on two ranks, whatever it is: a 3rd, 5th or 7th expert gets another beside it.
    return min(value + value % 2 if name in _EXPERTS and value > 1 else value, most)


def _keep_groups(tiny: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Keep heads with keys of their own, and layers with more heads than others."""
    for heads, keys in _GROUPS:
        if isinstance(config.get(keys), int) and config[keys] == config.get(heads):
            tiny[keys] = tiny[heads]
    if "index_topk_blocks" in config:  # whose blocks are chosen for each head of keys
        tiny["index_n_heads"] = tiny["num_key_value_heads"]
    if isinstance(counts := config.get("num_attention_heads_per_layer"), list):
        few = tiny["num_attention_heads"]
        tiny["num_attention_heads_per_layer"] = [few if count == min(counts) else 2 * few for count in counts]


def _keep_head_width(shrunk: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Keep whether a head is as wide as its share of the hidden size, wider or narrower."""
    names = ("head_dim", "hidden_size", "num_attention_heads")
    if not all(type(config.get(name)) is int and config[name] > 0 for name in names):
        return
    (width, share), (_, tiny) = ((sizes["head_dim"], sizes["hidden_size"] // sizes["num_attention_heads"])
                                 for sizes in (config, shrunk))  # fmt: skip
    if width == share:
        shrunk["head_dim"] = tiny
    elif shrunk["head_dim"] == tiny:
        shrunk["head_dim"] = 2 * tiny if width > share else tiny // 2


def _keep_latent(tiny: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Keep which width latent attention takes for that of a head."""
    rotating = config.get("qk_rope_head_dim")
    for name in ("head_dim", "qk_head_dim"):
        if isinstance(rotating, int) and isinstance(config.get(name), int):
            plain = 0 if config[name] == rotating else tiny.get("qk_nope_head_dim", SIZES["qk_nope_head_dim"])
            tiny[name] = tiny["qk_rope_head_dim"] + plain


def _keep_state_heads(tiny: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Keep how the inner width of a state space model is made up."""
    expand = config.get("mamba_expand") or config.get("expand")
    if not isinstance(expand, (int, float)) or not isinstance(config.get("hidden_size"), int):
        return
    before, after = (int(expand * sizes["hidden_size"]) for sizes in (config, tiny))
    if config.get("mamba_d_ssm"):
        tiny["mamba_d_ssm"] = after
    if config.get("intermediate_size") == before:
        tiny["intermediate_size"] = after
    for heads, head in _STATE_HEADS:
        if isinstance(config.get(heads), int) and isinstance(config.get(head), int):
            tiny[heads] = after // tiny[head]


def _keep_rotation(tiny: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Keep the part of a head that rotates, and lists with an entry for each pair of its dimensions."""
    before, after = (_rotating_width(sizes) for sizes in (config, tiny))
    if not before or not after:
        return
    if isinstance(config.get("rotary_dim"), int):
        tiny["rotary_dim"] = config["rotary_dim"] * after // before
    for rope in _ropes(tiny):
        for name in _HALVES:
            if isinstance(factors := rope.get(name), list):
                rope[name] = factors[: len(factors) * after // before]
        if isinstance(sections := rope.get(_SECTIONS), list):
            few = [size * after // before for size in sections]
            rope[_SECTIONS] = [few[0] + sum(sections) * after // before - sum(few), *few[1:]]


def _keep_context(
    rope: dict[str, Any], before: Mapping[str, Any], config: Mapping[str, Any], tiny: dict[str, Any], seq_len: int
) -> None:
    """Keep whether rows are longer than the context before it was stretched, and by how much that was."""
    context, most = before.get(_CONTEXT), config.get("max_position_embeddings")
    kind = before.get("rope_type") or before.get("type")
    if kind == "dynamic" and isinstance(most, int) and seq_len > most:  # whose frequencies depend on it alone
        tiny["max_position_embeddings"] = _SHORT
        return
    if not isinstance(context, int) or not context:
        return
    rope[_CONTEXT] = few = min(context, _SHORT if seq_len > context else _LONG)
    if isinstance(most, int) and isinstance(tiny.get("max_position_embeddings"), int):
        tiny["max_position_embeddings"] = max(few * most // context, 2 * _SHORT)


def _rotating_width(config: Mapping[str, Any]) -> int:
    """Return the width of a head, or of what latent attention rotates of it; 0: unknown."""
    for name in ("qk_rope_head_dim", "head_dim"):
        if isinstance(width := config.get(name), int):
            return width
    width = next((config[name] for name in ("hidden_size", "n_embd") if isinstance(config.get(name), int)), 0)
    heads = next((config[name] for name in ("num_attention_heads", "n_head") if isinstance(config.get(name), int)), 0)
    return width // heads if heads else 0


def _ropes(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parameters of each RoPE: one of the model, or one of each type of layers."""
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(parameters := config.get(name), dict):
            yield parameters
            yield from (entry for entry in parameters.values() if isinstance(entry, dict))
