"""How far back the attention of each layer sees, by its config.

Source: transformers 5.23, `models/*/configuration_*.py` and `_ignore_causal_mask_sdpa` of `masking_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# By the beginning of a layer's type in `layer_types`.
_SIZES = {"sliding": "sliding_window", "hybrid_sliding": "sliding_window", "chunked": "attention_chunk_size"}
# What a config means that lists no types: each so many layers, one sees whole rows; 0: none does.
_PERIODS = {
    "Cohere2ForCausalLM": 4, "Gemma3ForCausalLM": 6, "Gemma3ForConditionalGeneration": 6, "Llama4ForCausalLM": 4,
    "Llama4ForConditionalGeneration": 4, "Ministral3ForCausalLM": 0, "MinistralForCausalLM": 0,
    "Mistral3ForConditionalGeneration": 0, "MistralForCausalLM": 0, "MixtralForCausalLM": 0, "Phi3ForCausalLM": 0,
    "PhimoeForCausalLM": 0, "Starcoder2ForCausalLM": 0,
}  # fmt: skip


def windows_of(architecture: str, config: Mapping[str, object], layers: Sequence[str]) -> dict[str, int]:
    """Return the windows of a decoder's layers by name, in tokens, without layers that see whole rows.

    `config` has the decoder's fields; values that no window can have are passed over.
    """
    if config.get("use_sliding_window") is False:
        return {}
    types, period = config.get("layer_types"), config.get("sliding_window_pattern", _PERIODS.get(architecture))
    fields = list[str | None]()  # that have the window, of each layer
    if isinstance(types, list):
        fields = [next((_SIZES[start] for start in _SIZES if str(kind).startswith(start)), None) for kind in types]
    elif isinstance(period, int):
        field = "sliding_window" if config.get("sliding_window") else "attention_chunk_size"
        fields = [None if period and not (number + 1) % period else field for number in range(len(layers))]
    windows = {layer: config.get(field) for layer, field in zip(layers, fields, strict=False) if field}
    return {layer: window for layer, window in windows.items() if type(window) is int and window > 0}
