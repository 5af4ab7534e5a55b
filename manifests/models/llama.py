"""Llama 2, 3, 3.1, 3.2 and same-shaped models.

Source: transformers 5.23, `models/llama/modeling_llama.py`.
"""

from __future__ import annotations

from manifests.errors import InputError
from manifests.models.shape import MAX_LAYERS, ConfigReader, ModelShape

__all__ = ["llama_shape"]

EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


def llama_shape(config: ConfigReader) -> ModelShape:
    """Give the tensors of a `LlamaForCausalLM`.

    Shapes: as stored; D = hidden_size, F = intermediate_size, H and K = query and key-value heads of
    width h, V = vocab_size. q_proj (H h, D), k_proj and v_proj (K h, D), o_proj (D, H h), gate_proj
    and up_proj (F, D), down_proj (D, F), embedding and head (V, D).
    """
    width, ffn, vocab = (config.count(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    num_layers, heads = config.count("num_hidden_layers", most=MAX_LAYERS), config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(
            f"{config.where}: num_key_value_heads",
            f"expected a divisor of num_attention_heads {heads}, found {kv_heads}",
        )
    head = config.count("head_dim", width // heads)
    block: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * head, width),
        "self_attn.k_proj.weight": (kv_heads * head, width),
        "self_attn.v_proj.weight": (kv_heads * head, width),
        "self_attn.o_proj.weight": (width, heads * head),
        "mlp.gate_proj.weight": (ffn, width),
        "mlp.up_proj.weight": (ffn, width),
        "mlp.down_proj.weight": (width, ffn),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    biased = [("attention_bias", "self_attn."), ("mlp_bias", "mlp.")]
    for field, prefix in biased:
        if config.flag(field, False):
            block |= {
                name.replace(".weight", ".bias"): shape[:1] for name, shape in block.items() if name.startswith(prefix)
            }
    layers = tuple(f"model.layers.{index}" for index in range(num_layers))
    tensors: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (vocab, width)}
    tensors |= {f"{layer}.{name}": shape for layer in layers for name, shape in block.items()}
    tensors |= {f"{NORM}.weight": (width,), f"{HEAD}.weight": (vocab, width)}
    tied = config.flag("tie_word_embeddings", False)
    return ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        modules=(EMBEDDING, *layers, NORM, HEAD),
        tensors=tensors,
        ties=((f"{EMBEDDING}.weight", f"{HEAD}.weight"),) if tied else (),
        ignored_suffixes=(".self_attn.rotary_emb.inv_freq",),
    )
