"""Qwen3, dense and with experts.

Source: transformers 5.23, `models/qwen3/modeling_qwen3.py`, `models/qwen3_moe/modeling_qwen3_moe.py`.
"""

from __future__ import annotations

from manifests.models.components import attention, experts, gated_mlp, layer, routing
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import decoder
from manifests.models.quantized import as_stored, fp8
from manifests.models.shape import ModelShape

DEFAULT_HEAD = 128  # Qwen3Config


def qwen3_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `Qwen3ForCausalLM`."""
    width, bias = config.count("hidden_size"), config.flag("attention_bias", False)
    block = layer(
        attention(config, head=config.count("head_dim", DEFAULT_HEAD), bias=bias, qk_norm=True),
        gated_mlp(width, config.count("intermediate_size")),
        width,
    )
    shape = decoder("Qwen3ForCausalLM", config, [block] * config.count("num_hidden_layers", most=MAX_LAYERS))
    return as_stored(shape, config, {"fp8": fp8})


def qwen3_moe_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `Qwen3MoeForCausalLM`.

    Layers named by `mlp_only_layers`, and all but every `decoder_sparse_step`-th, are dense.
    """
    width, bias = config.count("hidden_size"), config.flag("attention_bias", False)
    head = config.count("head_dim", width // config.count("num_attention_heads"))
    count, per_token = routing(config, "num_experts" if config.has("num_experts") else "num_local_experts")
    attended = attention(config, head=head, bias=bias, qk_norm=True)
    routed = experts(width, config.count("moe_intermediate_size"), count=count, per_token=per_token)
    sparse = layer(attended, routed, width)
    dense = layer(attended, gated_mlp(width, config.count("intermediate_size")), width)
    step, dense_layers = config.count("decoder_sparse_step", 1), set(config.counts("mlp_only_layers"))
    layers = [
        dense if index in dense_layers or (index + 1) % step else sparse
        for index in range(config.count("num_hidden_layers", most=MAX_LAYERS))
    ]
    return as_stored(decoder("Qwen3MoeForCausalLM", config, layers), config, {"fp8": fp8})
