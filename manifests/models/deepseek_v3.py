"""DeepSeek-V3 and R1, Kimi K2, Moonlight: latent attention, many experts, prediction of further tokens.

Source: transformers 5.23, `models/deepseek_v3/modeling_deepseek_v3.py`; DeepSeek-AI 2024, "DeepSeek-V3
Technical Report", 2.1 and 2.2; deepseek-ai/DeepSeek-V3, `README_WEIGHTS.md`.
"""

from __future__ import annotations

from dataclasses import replace

from manifests.models.components import Component, experts, gated_mlp, layer, linear, norm, routing
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import decoder, head
from manifests.models.quantized import as_stored, fp8
from manifests.models.shape import ModelShape, Work


def deepseek_v3_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `DeepseekV3ForCausalLM`.

    The first layers are dense. MTP layers have an embedding and a head of their own: copies of the
    model's, which files store.
    """
    config.expect("moe_layer_freq", 1)
    config.expect("topk_method", "noaux_tc")
    width, num_layers = config.count("hidden_size"), config.count("num_hidden_layers", most=MAX_LAYERS)
    attention = latent_attention(config)
    dense = layer(attention, gated_mlp(width, config.count("intermediate_size")), width)
    sparse = layer(attention, _experts(config), width)
    num_dense = min(config.count("first_k_dense_replace", least=0), num_layers)
    num_mtp = config.count("num_nextn_predict_layers", 0, most=MAX_LAYERS, least=0)
    shape = decoder(
        "DeepseekV3ForCausalLM",
        config,
        [dense] * num_dense + [sparse] * (num_layers - num_dense),
        mtp=[_mtp_layer(sparse, width, config.count("vocab_size"))] * num_mtp,
    )
    buffers = (".gate.e_score_correction_bias",)
    return as_stored(replace(shape, untrained_suffixes=buffers), config, {"fp8": fp8})


def latent_attention(config: ConfigReader) -> Component:
    """Multi-head latent attention (MLA), keys and values expanded, as in training.

    Letters: q and c = ranks of queries and of keys and values; n, r, v = widths of a head's part without
    position, with position, and of its value.
    Shapes: q_a_proj (q, D), q_b_proj (H (n + r), q), or q_proj (H (n + r), D) without q;
    kv_a_proj_with_mqa (c + r, D), kv_b_proj (H (n + v), c), o_proj (D, H v).
    FLOPs: the matrices, and 2 H (n + r) + 2 H v for each key.
    Kept: besides the latents with their norms, queries, keys, kv_b_proj's output (values are a part of it),
    output, and the softmax's sum for each head.
    Source: `DeepseekV3Attention`; DeepSeek-V3 Technical Report, 2.1.1, equations 1 to 11.
    """
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    bias = config.flag("attention_bias", False)
    plain, rotary = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    value, kv_rank = config.count("v_head_dim"), config.count("kv_lora_rank")
    queries = heads * (plain + rotary)
    if config.has("q_lora_rank"):
        q_rank = config.count("q_lora_rank")
        part = linear(width, q_rank, bias=bias).below("q_a_proj")
        part += norm(q_rank).below("q_a_layernorm") + linear(q_rank, queries).below("q_b_proj")
    else:
        part = linear(width, queries).below("q_proj")
    part += linear(width, kv_rank + rotary, bias=bias).below("kv_a_proj_with_mqa")
    part += norm(kv_rank).below("kv_a_layernorm") + linear(kv_rank, heads * (plain + value)).below("kv_b_proj")
    part += linear(heads * value, width, bias=bias).below("o_proj")
    kept = rotary + 2 * queries + heads * (plain + value) + heads * value
    per_key = 2 * queries + 2 * heads * value
    return part + Component(work=Work(flops_per_key=per_key, saved=kept, saved_fp32=heads, products=heads * value))


def _experts(config: ConfigReader) -> Component:
    """Routed experts, whose choice a stored bias balances, and shared ones, a single MLP that all tokens go through."""
    width, ffn = config.count("hidden_size"), config.count("moe_intermediate_size")
    count, per_token = routing(config, "n_routed_experts")
    shared = gated_mlp(width, ffn * config.count("n_shared_experts"))
    return (
        experts(width, ffn, count=count, per_token=per_token)
        + Component(tensors={"gate.e_score_correction_bias": (count,)})
        + shared.below("shared_experts")
    )


def _mtp_layer(block: Component, width: int, vocab: int) -> Component:
    """A decoder layer that sees the last hidden state beside the next token's embedding, and predicts one further.

    Shapes: eh_proj (D, 2 D), whose input is the outputs of enorm and hnorm side by side.
    Source: DeepSeek-V3 Technical Report, 2.2, equations 21 to 23.
    """
    return (
        block
        + Component(tensors={"embed_tokens.weight": (vocab, width)})
        + norm(width).below("enorm")
        + norm(width).below("hnorm")
        + linear(2 * width, width).below("eh_proj")
        + norm(width).below("shared_head.norm")
        + head(width, vocab).below("shared_head.head")
    )
