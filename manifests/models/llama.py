"""Llama and its kin: Llama 2 to 3.2, Mistral 7B, Qwen 2, Qwen 3 and Mixtral.

Source: transformers 5.23, `models/{llama,mistral,qwen2,qwen3,qwen3_moe,mixtral}/modeling_*.py`.
"""

from __future__ import annotations

from manifests.models.components import Component, attention, experts, gated_mlp, layer, norm, routing
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import decoder
from manifests.models.quantized import as_stored, fp8
from manifests.models.shape import ModelShape


def llama_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `LlamaForCausalLM`."""
    biases = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return _shape("LlamaForCausalLM", config, *biases)


def mistral_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `MistralForCausalLM`: a Llama's, without biases."""
    return _shape("MistralForCausalLM", config, False, False)


def _shape(architecture: str, config: ConfigReader, attention_bias: bool, mlp_bias: bool) -> ModelShape:
    width = config.count("hidden_size")
    head = config.count("head_dim", width // config.count("num_attention_heads"))
    block = layer(
        attention(config, head=head, bias=attention_bias),
        gated_mlp(width, config.count("intermediate_size"), bias=mlp_bias),
        width,
    )
    shape = decoder(architecture, config, [block] * config.count("num_hidden_layers", most=MAX_LAYERS))
    return as_stored(shape, config, {})


def qwen2_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `Qwen2ForCausalLM`."""
    width = config.count("hidden_size")
    head = config.count("head_dim", width // config.count("num_attention_heads"))
    block = layer(
        attention(config, head=head, bias=True, out_bias=False),
        gated_mlp(width, config.count("intermediate_size")),
        width,
    )
    shape = decoder("Qwen2ForCausalLM", config, [block] * config.count("num_hidden_layers", most=MAX_LAYERS))
    return as_stored(shape, config, {})


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


# What files of transformers 4 and 5 call the matrices of a gated MLP. In memory transformers 5 has all experts of a
# layer in two tensors, and no others.
_FILE_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixtral_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `MixtralForCausalLM`.

    Shapes: experts.0.w1 and w3 (F, D), w2 (D, F); gate (E, D).
    """
    width = config.count("hidden_size")
    head = config.count("head_dim", width // config.count("num_attention_heads"))
    count, per_token = routing(config, "num_local_experts")
    routed = experts(width, config.count("intermediate_size"), count=count, per_token=per_token)
    block = (
        attention(config, head=head, bias=False).below("self_attn")
        + _as_filed(routed).below("block_sparse_moe")
        + norm(width).below("input_layernorm")
        + norm(width).below("post_attention_layernorm")
    )
    shape = decoder("MixtralForCausalLM", config, [block] * config.count("num_hidden_layers", most=MAX_LAYERS))
    return as_stored(shape, config, {})


def _as_filed(routed: Component) -> Component:
    tensors = {}
    for leaf, dims in routed.tensors.items():
        module, _, weight = leaf.rpartition(".")
        outer, _, name = module.rpartition(".")
        tensors[f"{outer}.{_FILE_NAMES[name]}.{weight}" if name in _FILE_NAMES else leaf] = dims
    return Component(tensors=tensors, work=routed.work)
