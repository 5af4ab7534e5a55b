"""Models with Llama's blocks: RMS norms, rotary positions, gated MLPs or experts.

Llama 2 to 3.2, Mistral 7B, Qwen 2 and 3, Mixtral; Gemma 2, and Gemma 3 without pictures (norms before and after both
halves of a layer); GPT-OSS (attention sinks, biases, experts whose matrices are in one tensor); DeepSeek-V3 and R1,
Kimi K2, Moonlight (latent attention, many experts, prediction of further tokens).

Source: transformers 5.23, `models/{llama,mistral,qwen2,qwen3,qwen3_moe,mixtral,gemma2,gemma3,gpt_oss,deepseek_v3}/
modeling_*.py`; Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size"; OpenAI 2025,
"gpt-oss-120b & gpt-oss-20b Model Card"; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", 2.1 and 2.2;
deepseek-ai/DeepSeek-V3, `README_WEIGHTS.md`.
"""

from __future__ import annotations

from dataclasses import replace

from manifests.models.components import (
    SOFTCAPPING,
    Component,
    attention,
    decoder,
    expert_work,
    experts,
    fp8,
    gated_mlp,
    head,
    layer,
    linear,
    mtp_parts,
    mxfp4,
    norm,
    routing,
    scaled_in_float32,
)
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.shape import ModelShape, Work


def llama_shape(config: ConfigReader) -> ModelShape:
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return decoder("LlamaForCausalLM", config, _dense_layer(config, attention(config, bias=bias), bias=mlp_bias))


def mistral_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `MistralForCausalLM`: a Llama's, without biases."""
    return decoder("MistralForCausalLM", config, _dense_layer(config, attention(config, bias=False)))


def _dense_layer(config: ConfigReader, attended: Component, *, bias: bool = False) -> Component:
    width = config.count("hidden_size")
    return layer(attended, gated_mlp(width, config.count("intermediate_size"), bias=bias), width)


def qwen2_shape(config: ConfigReader) -> ModelShape:
    return decoder("Qwen2ForCausalLM", config, _dense_layer(config, attention(config, bias=True, out_bias=False)))


QWEN3_HEAD = 128  # Qwen3Config


def qwen3_shape(config: ConfigReader) -> ModelShape:
    attended = attention(config, head=QWEN3_HEAD, bias=config.flag("attention_bias", False), qk_norm=True)
    return decoder("Qwen3ForCausalLM", config, _dense_layer(config, attended), methods={"fp8": fp8})


def qwen3_moe_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `Qwen3MoeForCausalLM`.

    Layers named by `mlp_only_layers`, and all but every `decoder_sparse_step`-th, are dense.
    """
    width = config.count("hidden_size")
    count, per_token = routing(config, "num_experts" if config.has("num_experts") else "num_local_experts")
    attended = attention(config, bias=config.flag("attention_bias", False), qk_norm=True)
    routed = experts(width, config.count("moe_intermediate_size"), count=count, per_token=per_token)
    sparse, dense = layer(attended, routed, width), _dense_layer(config, attended)
    step, dense_layers = config.count("decoder_sparse_step", 1), set(config.counts("mlp_only_layers"))
    layers = [
        dense if index in dense_layers or (index + 1) % step else sparse
        for index in range(config.count("num_hidden_layers", most=MAX_LAYERS))
    ]
    return decoder("Qwen3MoeForCausalLM", config, layers, methods={"fp8": fp8})


# What files of transformers 4 and 5 call the matrices of a gated MLP. In memory transformers 5 has all experts of a
# layer in two tensors, and no others.
_FILE_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixtral_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `MixtralForCausalLM`.

    Shapes: experts.0.w1 and w3 (F, D), w2 (D, F); gate (E, D).
    """
    width = config.count("hidden_size")
    count, per_token = routing(config, "num_local_experts")
    routed = experts(width, config.count("intermediate_size"), count=count, per_token=per_token)
    block = (
        attention(config, bias=False).below("self_attn")
        + _as_filed(routed).below("block_sparse_moe")
        + norm(width).below("input_layernorm")
        + norm(width).below("post_attention_layernorm")
    )
    return decoder("MixtralForCausalLM", config, block)


def _as_filed(routed: Component) -> Component:
    tensors = {}
    for leaf, dims in routed.tensors.items():
        module, _, weight = leaf.rpartition(".")
        outer, _, name = module.rpartition(".")
        tensors[f"{outer}.{_FILE_NAMES[name]}.{weight}" if name in _FILE_NAMES else leaf] = dims
    return Component(tensors=tensors, work=routed.work)


def deepseek_v3_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `DeepseekV3ForCausalLM`.

    The first layers are dense. MTP layers have an embedding and a head of their own: copies of the
    model's, which files store.
    """
    config.expect("moe_layer_freq", 1)
    config.expect("topk_method", "noaux_tc")
    width, num_layers = config.count("hidden_size"), config.count("num_hidden_layers", most=MAX_LAYERS)
    attended = latent_attention(config)
    dense, sparse = _dense_layer(config, attended), layer(attended, _deepseek_experts(config), width)
    num_dense = min(config.count("first_k_dense_replace", least=0), num_layers)
    num_mtp = config.count("num_nextn_predict_layers", 0, most=MAX_LAYERS, least=0)
    shape = decoder(
        "DeepseekV3ForCausalLM",
        config,
        [dense] * num_dense + [sparse] * (num_layers - num_dense),
        mtp=[_mtp_layer(sparse, width, config.count("vocab_size"))] * num_mtp,
        methods={"fp8": fp8},
    )
    return replace(shape, untrained_suffixes=(".gate.e_score_correction_bias", *shape.untrained_suffixes))


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
    saved = rotary + 2 * queries + heads * (plain + value) + heads * value
    per_key = 2 * queries + 2 * heads * value
    keys = queries + heads * (plain + value)
    work = Work(flops_per_key=per_key, saved=saved, saved_fp32=heads, products=heads * value, keys=keys)
    return part + Component(work=work)


def _deepseek_experts(config: ConfigReader) -> Component:
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
        + mtp_parts(width)
        + head(width, vocab).below("shared_head.head")
    )


GEMMA_HEAD = 256  # Gemma2Config, Gemma3TextConfig


def gemma2_shape(config: ConfigReader) -> ModelShape:
    # Scores are capped, which no fused attention does: the tanh is kept, too.
    return _gemma_shape("Gemma2ForCausalLM", config, qk_norm=False, of_head=Work(scores=1, softmaxes=1))


def gemma3_shape(config: ConfigReader) -> ModelShape:
    return _gemma_shape("Gemma3ForCausalLM", config, qk_norm=True)


def _gemma_shape(architecture: str, config: ConfigReader, *, qk_norm: bool, of_head: Work | None = None) -> ModelShape:
    width, bias = config.count("hidden_size"), config.flag("attention_bias", False)
    after = Work(saved=2 * width, whole=2 * width)  # what norms before residuals give, which no matrix needs
    block = (
        _dense_layer(config, attention(config, head=GEMMA_HEAD, bias=bias, qk_norm=qk_norm, of_head=of_head))
        + norm(width).below("pre_feedforward_layernorm")
        + norm(width).below("post_feedforward_layernorm")
        + Component(work=Work() - after)
    )
    capped = config.config.get(SOFTCAPPING, 30.0 if architecture == "Gemma2ForCausalLM" else None) is not None
    return scaled_in_float32(decoder(architecture, config, block, tied_unless_said=True, caps_logits=capped))


GPT_OSS_HEAD = 64  # GptOssConfig


def gpt_oss_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `GptOssForCausalLM`.

    Shapes: sinks (H); otherwise see `manifests.models.components.attention`.
    """
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    bias, scores = config.flag("attention_bias", True), Work(scores=1)  # sinks are in the softmax, which no kernel has
    attended = attention(config, head=GPT_OSS_HEAD, bias=bias, of_head=scores)
    attended += Component(tensors={"sinks": (heads,)})
    block = layer(attended, _gpt_oss_experts(config), width)
    return scaled_in_float32(decoder("GptOssForCausalLM", config, block, methods={"mxfp4": mxfp4}))


def _gpt_oss_experts(config: ConfigReader) -> Component:
    """Experts with their gates and ups interleaved, and the router.

    Shapes: router (E, D); gate_up_proj (E, D, 2 F), down_proj (E, F, D): inputs before outputs, unlike
    everywhere else.
    FLOPs: see `manifests.models.components.experts`.
    Kept: as there, but 7 F by each expert: gate and up, both clamped, the sigmoid, the gate times it, the
    product. A kernel that fuses them keeps less.
    """
    width, ffn = config.count("hidden_size"), config.count("intermediate_size")
    count, per_token = routing(config, "num_local_experts")
    expert = Work(flops=6 * width * ffn, saved=7 * ffn, products=2 * ffn + width)
    return Component(
        tensors={
            "router.weight": (count, width),
            "router.bias": (count,),
            "experts.gate_up_proj": (count, width, 2 * ffn),
            "experts.gate_up_proj_bias": (count, 2 * ffn),
            "experts.down_proj": (count, ffn, width),
            "experts.down_proj_bias": (count, width),
        },
        work=expert_work(expert, width, count=count, per_token=per_token),
    )
