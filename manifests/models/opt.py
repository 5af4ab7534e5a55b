"""OPT: learned positions, and in the 350M model projections beside the embedding and the head.

Source: transformers 5.23, `models/opt/modeling_opt.py`; Zhang et al. 2022, "OPT: Open Pre-trained Transformer
Language Models".
"""

from __future__ import annotations

from dataclasses import replace

from manifests.models.components import Component, layer_norm, linear, mlp
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.decoder import HEAD, assemble, embedding, head, head_tie
from manifests.models.quantized import as_stored
from manifests.models.shape import ModelShape, Work

POSITIONS_AHEAD = 2  # rows of the table before that of the first position


def opt_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of an `OPTForCausalLM`.

    Shapes: embed_tokens (V, P), embed_positions (positions + 2, D), project_in (D, P), project_out (P, D),
    lm_head (V, P); P = `word_embed_proj_dim`, D without projections.
    """
    width, vocab = config.count("hidden_size"), config.count("vocab_size")
    narrow = config.count("word_embed_proj_dim", width)
    num_layers = config.count("num_hidden_layers", most=MAX_LAYERS)
    affine = config.flag("layer_norm_elementwise_affine", True)
    block = _block(config, width, affine=affine)
    ends_with_norm = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False)
    parts = {
        "embed_tokens": embedding(vocab, narrow),
        **({"project_in": linear(narrow, width)} if narrow != width else {}),
        "embed_positions": embedding(config.count("max_position_embeddings") + POSITIONS_AHEAD, width),
        **{f"layers.{index}": block for index in range(num_layers)},
        **({"final_layer_norm": layer_norm(width, weight=affine, bias=affine)} if ends_with_norm else {}),
        **({"project_out": linear(width, narrow)} if narrow != width else {}),
    }
    modules = {f"model.decoder.{name}": part for name, part in parts.items()} | {HEAD: head(narrow, vocab)}
    shape = assemble("OPTForCausalLM", modules, num_layers=num_layers, hidden_size=width)
    tied = config.flag("tie_word_embeddings", True)
    return as_stored(
        replace(shape, ties=head_tie("model.decoder.embed_tokens") if tied else (), base="model."), config, {}
    )


def _block(config: ConfigReader, width: int, *, affine: bool) -> Component:
    """A layer: attention and MLP, and a norm before or after either.

    Shapes: q_proj, k_proj, v_proj and out_proj (D, D), fc1 (F, D), fc2 (D, F).
    Kept by attention: queries, keys, values, output, and the softmax's sum for each head.
    """
    heads, ffn, bias = config.count("num_attention_heads"), config.count("ffn_dim"), config.flag("enable_bias", True)
    if width % heads:
        problem = f"expected a divisor of hidden_size {width}, found {heads}"
        raise config.error("num_attention_heads", problem, code="config.inconsistent-fields")
    block = Component(work=Work(flops_per_key=4 * width, saved=4 * width, saved_fp32=heads, products=width))
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        block += linear(width, width, bias=bias).below(f"self_attn.{name}")
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        block += layer_norm(width, weight=affine, bias=affine).below(name)
    up, down = linear(width, ffn, bias=bias).below("fc1"), linear(ffn, width, bias=bias).below("fc2")
    return block + mlp(up, down, ffn)
