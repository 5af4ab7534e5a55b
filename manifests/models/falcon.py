"""Falcon: queries, keys and values in one matrix, attention and MLP side by side.

Source: transformers 5.23, `models/falcon/modeling_falcon.py`; Almazrouei et al. 2023, "The Falcon Series of Open
Language Models".
"""

from __future__ import annotations

from dataclasses import replace

from manifests.models.components import Component, layer_norm, linear, mlp
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import HEAD, assemble, embedding, head, head_tie
from manifests.models.quantized import as_stored
from manifests.models.shape import ModelShape, Work


def falcon_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `FalconForCausalLM`: 7B, 40B and 180B's decoders, and Falcon-RW's."""
    config.expect("apply_residual_connection_post_layernorm", False)
    width, vocab = config.count("hidden_size"), config.count("vocab_size")
    num_layers = config.count("num_hidden_layers", most=MAX_LAYERS)
    block = _block(config, width)
    parts = {
        "transformer.word_embeddings": embedding(vocab, width),
        **{f"transformer.h.{index}": block for index in range(num_layers)},
        "transformer.ln_f": layer_norm(width),
        HEAD: head(width, vocab),
    }
    shape = assemble("FalconForCausalLM", parts, num_layers=num_layers, hidden_size=width)
    tied = config.flag("tie_word_embeddings", True)
    shape = replace(shape, ties=head_tie("transformer.word_embeddings") if tied else ())
    return as_stored(replace(shape, ignored_suffixes=(".self_attention.rotary_emb.inv_freq",)), config, {})


def _block(config: ConfigReader, width: int) -> Component:
    bias, ffn = config.flag("bias", False), config.count("ffn_hidden_size", 4 * width)
    up = linear(width, ffn, bias=bias).below("dense_h_to_4h")
    down = linear(ffn, width, bias=bias).below("dense_4h_to_h")
    block = _attention(config, width, bias=bias).below("self_attention") + mlp(up, down, ffn).below("mlp")
    for name in _norms(config):
        block += layer_norm(width).below(name)
    return block


def _attention(config: ConfigReader, width: int, *, bias: bool) -> Component:
    """Attention.

    Shapes: query_key_value ((H + 2 K) h, D), dense (D, D). K = 1 in 7B (`multi_query`), H in Falcon-RW.
    Kept: queries, keys, values, output, and the softmax's sum for each head. The new decoder copies keys and
    values for every head.
    """
    heads = config.count("num_attention_heads")
    if width % heads:
        problem = f"expected a divisor of hidden_size {width}, found {heads}"
        raise config.error("num_attention_heads", problem, code="config.inconsistent-fields")
    is_new = config.flag("new_decoder_architecture", False)
    kv_heads = config.count("num_kv_heads", heads) if is_new else 1 if config.flag("multi_query", True) else heads
    if heads % kv_heads:
        problem = f"expected a divisor of num_attention_heads {heads}, found {kv_heads}"
        raise config.error("num_kv_heads", problem, code="config.inconsistent-fields")
    size = width // heads
    copied = heads if is_new else kv_heads
    return (
        linear(width, (heads + 2 * kv_heads) * size, bias=bias).below("query_key_value")
        + linear(width, width, bias=bias).below("dense")
        + Component(
            work=Work(flops_per_key=4 * width, saved=2 * width + 2 * copied * size, saved_fp32=heads, products=width)
        )
    )


def _norms(config: ConfigReader) -> tuple[str, ...]:
    is_new = config.flag("new_decoder_architecture", False)
    if not config.flag("parallel_attn", True):
        if is_new:
            problem = "expected true beside new_decoder_architecture, found false"
            raise config.error("parallel_attn", problem, code="config.inconsistent-fields")
        return "input_layernorm", "post_attention_layernorm"
    count = config.count("num_ln_in_parallel_attn", 2 if is_new else 1, most=2)
    if count == 2 and not is_new:
        problem = "expected 1 without new_decoder_architecture, found 2"
        raise config.error("num_ln_in_parallel_attn", problem, code="config.inconsistent-fields")
    return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)
