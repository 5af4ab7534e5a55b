"""Qwen2 and Qwen2.5, dense: a Llama with biases on queries, keys and values.

Source: transformers 5.23, `models/qwen2/modeling_qwen2.py`.
"""

from __future__ import annotations

from manifests.models.components import attention, gated_mlp, layer
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import decoder
from manifests.models.quantized import as_stored
from manifests.models.shape import ModelShape


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
