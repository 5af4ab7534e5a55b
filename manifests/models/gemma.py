"""Gemma 2, and Gemma 3 without pictures: norms before and after both halves of a layer.

Source: transformers 5.23, `models/gemma2/modeling_gemma2.py`, `models/gemma3/modeling_gemma3.py`; Gemma Team 2024,
"Gemma 2: Improving Open Language Models at a Practical Size".
"""

from __future__ import annotations

from manifests.models.components import attention, gated_mlp, layer, norm
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import decoder
from manifests.models.quantized import as_stored
from manifests.models.shape import ModelShape

DEFAULT_HEAD = 256  # Gemma2Config, Gemma3TextConfig


def gemma2_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `Gemma2ForCausalLM`."""
    return _shape("Gemma2ForCausalLM", config, qk_norm=False)


def gemma3_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `Gemma3ForCausalLM`."""
    return _shape("Gemma3ForCausalLM", config, qk_norm=True)


def _shape(architecture: str, config: ConfigReader, *, qk_norm: bool) -> ModelShape:
    width, bias = config.count("hidden_size"), config.flag("attention_bias", False)
    attended = attention(config, head=config.count("head_dim", DEFAULT_HEAD), bias=bias, qk_norm=qk_norm)
    block = (
        layer(attended, gated_mlp(width, config.count("intermediate_size")), width)
        + norm(width).below("pre_feedforward_layernorm")
        + norm(width).below("post_feedforward_layernorm")
    )
    layers = [block] * config.count("num_hidden_layers", most=MAX_LAYERS)
    return as_stored(decoder(architecture, config, layers, tied_unless_said=True), config, {})
