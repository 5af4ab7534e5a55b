"""Llama 2, 3, 3.1, 3.2, and Mistral 7B and its like.

Source: transformers 5.23, `models/llama/modeling_llama.py`, `models/mistral/modeling_mistral.py`.
"""

from __future__ import annotations

from manifests.models.components import attention, gated_mlp, layer
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import decoder
from manifests.models.quantized import as_stored
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
