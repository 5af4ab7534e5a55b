"""Phi-1, 1.5 and 2; and Phi-3, a Llama whose matrices are joined.

Source: transformers 5.23, `models/phi/modeling_phi.py`, `models/phi3/modeling_phi3.py`.
"""

from __future__ import annotations

from dataclasses import replace

from manifests.models.components import Component, layer, layer_norm, linear, mlp
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import HEAD, ROTARY_BUFFERS, assemble, decoder, embedding, head, head_tie
from manifests.models.quantized import as_stored
from manifests.models.shape import ModelShape, Work


def phi_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `PhiForCausalLM`, whose head has a bias, which is not tied."""
    width, vocab = config.count("hidden_size"), config.count("vocab_size")
    num_layers = config.count("num_hidden_layers", most=MAX_LAYERS)
    block = _phi_block(config, width)
    parts = {
        "model.embed_tokens": embedding(vocab, width),
        **{f"model.layers.{index}": block for index in range(num_layers)},
        "model.final_layernorm": layer_norm(width),
        HEAD: head(width, vocab, bias=True),
    }
    shape = assemble("PhiForCausalLM", parts, num_layers=num_layers, hidden_size=width)
    tied = config.flag("tie_word_embeddings", False)
    ties = head_tie("model.embed_tokens") if tied else ()
    return as_stored(replace(shape, ties=ties, ignored_suffixes=ROTARY_BUFFERS), config, {})


def _phi_block(config: ConfigReader, width: int) -> Component:
    """A layer: one norm, attention and MLP side by side.

    Shapes: q_proj (D, D), k_proj and v_proj (K h, D), dense (D, D), fc1 (F, D), fc2 (D, F).
    Kept by attention: as `manifests.models.components.attention`, and its output in another order of memory too; of the
    norms on queries and keys, their inputs and statistics.
    """
    heads, kv_heads, size = _heads(config, width)
    ffn, keys = config.count("intermediate_size"), kv_heads * size
    attention = Component(
        work=Work(flops_per_key=4 * width, saved=3 * width + 2 * keys, saved_fp32=heads, products=width)
    )
    for name, outputs in (("q_proj", width), ("k_proj", keys), ("v_proj", keys), ("dense", width)):
        attention += linear(width, outputs, bias=True).below(name)
    if config.flag("qk_layernorm", False):
        tensors = {f"{name}_layernorm.{leaf}": (size,) for name in "qk" for leaf in ("weight", "bias")}
        attention += Component(tensors=tensors, work=Work(saved=width + keys, saved_fp32=2 * (heads + kv_heads)))
    up, down = linear(width, ffn, bias=True).below("fc1"), linear(ffn, width, bias=True).below("fc2")
    return attention.below("self_attn") + mlp(up, down, ffn).below("mlp") + layer_norm(width).below("input_layernorm")


def phi3_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `Phi3ForCausalLM` (Phi-3, Phi-3.5 and Phi-4, mini and medium)."""
    width = config.count("hidden_size")
    block = _phi3_block(config, width)
    shape = decoder("Phi3ForCausalLM", config, [block] * config.count("num_hidden_layers", most=MAX_LAYERS))
    return as_stored(shape, config, {})


def _phi3_block(config: ConfigReader, width: int) -> Component:
    """A Llama's layer.

    Shapes: qkv_proj ((H + 2 K) h, D), o_proj (D, H h), gate_up_proj (2 F, D), down_proj (D, F).
    Kept: as `manifests.models.components.attention` and `gated_mlp`, attention's output in another order of memory too;
    with the values, all that qkv_proj returns.
    """
    heads, kv_heads, size = _heads(config, width)
    ffn, keys = config.count("intermediate_size"), kv_heads * size
    attention = (
        linear(width, width + 2 * keys).below("qkv_proj")
        + linear(width, width).below("o_proj")
        + Component(work=Work(flops_per_key=4 * width, saved=4 * width + 3 * keys, saved_fp32=heads, products=width))
    )
    gated = (
        linear(width, 2 * ffn).below("gate_up_proj")
        + linear(ffn, width).below("down_proj")
        + Component(work=Work(saved=4 * ffn))
    )
    return layer(attention, gated, width)


def _heads(config: ConfigReader, width: int) -> tuple[int, int, int]:
    """Return the query heads, the key-value heads and a head's width."""
    heads = config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", heads)
    if width % heads:
        problem = f"expected a divisor of hidden_size {width}, found {heads}"
        raise config.error("num_attention_heads", problem, code="config.inconsistent-fields")
    if heads % kv_heads:
        problem = f"expected a divisor of num_attention_heads {heads}, found {kv_heads}"
        raise config.error("num_key_value_heads", problem, code="config.inconsistent-fields")
    return heads, kv_heads, width // heads
