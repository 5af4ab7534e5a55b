"""MPT, as transformers computes it: ALiBi and no biases.

Source: transformers 5.23, `models/mpt/modeling_mpt.py`; Press et al. 2021, "Train Short, Test Long".
"""

from __future__ import annotations

from dataclasses import replace

from manifests.models.components import Component, layer_norm, linear, mlp
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import HEAD, assemble, embedding, head, head_tie
from manifests.models.quantized import as_stored
from manifests.models.shape import ModelShape, Work


def mpt_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `MptForCausalLM`, which MosaicML's own configs call `MPTForCausalLM`."""
    config.expect("no_bias", True)
    config.expect("expansion_ratio", 4)
    attended = config.section("attn_config")
    if attended is not None:
        attended.expect("attn_type", "multihead_attention")
        attended.expect("alibi", True)
        attended.expect("qk_ln", False)
    width, vocab = config.count("d_model"), config.count("vocab_size")
    num_layers = config.count("n_layers", most=MAX_LAYERS)
    block = _block(config, width)
    parts = {
        "transformer.wte": embedding(vocab, width),
        **{f"transformer.blocks.{index}": block for index in range(num_layers)},
        "transformer.norm_f": layer_norm(width, bias=False),
        HEAD: head(width, vocab),
    }
    shape = assemble("MptForCausalLM", parts, num_layers=num_layers, hidden_size=width)
    tied = config.flag("tie_word_embeddings", True)
    return as_stored(replace(shape, ties=head_tie("transformer.wte") if tied else ()), config, {})


def _block(config: ConfigReader, width: int) -> Component:
    """A layer: norm, attention, norm, MLP.

    Shapes: Wqkv (3 D, D), out_proj (D, D), up_proj (4 D, D), down_proj (D, 4 D).
    Kept by attention: queries, keys, values, output, and the softmax's sum for each head.
    """
    heads, ffn = config.count("n_heads"), 4 * width
    if width % heads:
        problem = f"expected a divisor of d_model {width}, found {heads}"
        raise config.error("n_heads", problem, code="config.inconsistent-fields")
    attention = (
        linear(width, 3 * width).below("Wqkv")
        + linear(width, width).below("out_proj")
        + Component(work=Work(flops_per_key=4 * width, saved=4 * width, saved_fp32=heads, products=width))
    )
    return (
        layer_norm(width, bias=False).below("norm_1")
        + attention.below("attn")
        + layer_norm(width, bias=False).below("norm_2")
        + mlp(linear(width, ffn).below("up_proj"), linear(ffn, width).below("down_proj"), ffn).below("ffn")
    )
