"""GPT-2, with learned positions and matrices that are stored inputs first.

Source: transformers 5.23, `models/gpt2/modeling_gpt2.py`; Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners".
"""

from __future__ import annotations

from dataclasses import replace

from manifests.models.components import Component, layer_norm, linear, mlp
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import HEAD, assemble, embedding, head, head_tie
from manifests.models.quantized import as_stored
from manifests.models.shape import ModelShape, Work


def gpt2_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `GPT2LMHeadModel`.

    Files of the model without its head, as OpenAI's own are, name their tensors without `transformer.`; old ones
    contain causal masks.

    Shapes: wte (V, D), wpe (positions, D).
    """
    config.expect("add_cross_attention", False)
    width, vocab = config.count("n_embd"), config.count("vocab_size")
    num_layers = config.count("n_layer", most=MAX_LAYERS)
    block = _block(config, width)
    parts = {
        "transformer.wte": embedding(vocab, width),
        "transformer.wpe": embedding(config.count("n_positions"), width),
        **{f"transformer.h.{index}": block for index in range(num_layers)},
        "transformer.ln_f": layer_norm(width),
        HEAD: head(width, vocab),
    }
    shape = assemble("GPT2LMHeadModel", parts, num_layers=num_layers, hidden_size=width)
    return as_stored(
        replace(
            shape,
            ties=head_tie("transformer.wte") if config.flag("tie_word_embeddings", True) else (),
            ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
            base="transformer.",
        ),
        config,
        {},
    )


def _block(config: ConfigReader, width: int) -> Component:
    """A layer: norm, attention, norm, MLP.

    Shapes: c_attn (D, 3 D), attn.c_proj (D, D), c_fc (D, F), mlp.c_proj (F, D).
    Kept by attention: queries, keys, values, output, and the softmax's sum for each head.
    """
    heads, ffn = config.count("n_head"), config.count("n_inner", 4 * width)
    if width % heads:
        problem = f"expected a divisor of n_embd {width}, found {heads}"
        raise config.error("n_head", problem, code="config.inconsistent-fields")
    attention = (
        _conv1d(width, 3 * width).below("c_attn")
        + _conv1d(width, width).below("c_proj")
        + Component(work=Work(flops_per_key=4 * width, saved=4 * width, saved_fp32=heads, products=width))
    )
    return (
        layer_norm(width).below("ln_1")
        + attention.below("attn")
        + layer_norm(width).below("ln_2")
        + mlp(_conv1d(width, ffn).below("c_fc"), _conv1d(ffn, width).below("c_proj"), ffn).below("mlp")
    )


def _conv1d(inputs: int, outputs: int) -> Component:
    """A matrix with bias, stored (inputs, outputs).

    Source: transformers 5.23, `pytorch_utils.py`, `Conv1D`.
    """
    tensors = {"weight": (inputs, outputs), "bias": (outputs,)}
    return Component(tensors=tensors, work=linear(inputs, outputs).work)
