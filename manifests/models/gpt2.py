"""Models with blocks of their own: GPT-2, Falcon, MPT, OPT and Phi.

GPT-2 has learned positions, and matrices that are stored inputs first; Falcon queries, keys and values in one matrix,
attention and MLP side by side; MPT, as transformers computes it, ALiBi and no biases; OPT learned positions, and in the
350M model projections beside the embedding and the head. Phi-3 is a Llama whose matrices are joined.

Source: transformers 5.23, `models/{gpt2,falcon,mpt,opt,phi,phi3}/modeling_*.py`; Radford et al. 2019, "Language Models
are Unsupervised Multitask Learners"; Almazrouei et al. 2023, "The Falcon Series of Open Language Models"; Press et al.
2021, "Train Short, Test Long"; Zhang et al. 2022, "OPT: Open Pre-trained Transformer Language Models".
"""

from __future__ import annotations

from manifests.models.components import (
    HEAD,
    ROTARY_BUFFERS,
    Component,
    assemble,
    decoder,
    embedding,
    head,
    layer,
    layer_norm,
    linear,
    mlp,
)
from manifests.models.config import MAX_LAYERS, ConfigReader
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
    block = _gpt2_block(config, width)
    parts = {
        "transformer.wte": embedding(vocab, width),
        "transformer.wpe": embedding(config.count("n_positions"), width),
        **{f"transformer.h.{index}": block for index in range(num_layers)},
        "transformer.ln_f": layer_norm(width),
        HEAD: head(width, vocab),
    }
    ignored = (".attn.bias", ".attn.masked_bias")
    return assemble(
        "GPT2LMHeadModel", config, parts, num_layers=num_layers, width=width, tied=True, ignored_suffixes=ignored,
        base="transformer.",
    )  # fmt: skip


def _gpt2_block(config: ConfigReader, width: int) -> Component:
    """A layer: norm, attention, norm, MLP.

    Shapes: c_attn (D, 3 D), attn.c_proj (D, D), c_fc (D, F), mlp.c_proj (F, D).
    Kept by attention: queries, keys, values, output, and the softmax's sum for each head.
    """
    heads, ffn = config.divisor("n_head", "n_embd", width), config.count("n_inner", 4 * width)
    up, down = _conv1d(width, ffn).below("c_fc"), _conv1d(ffn, width).below("c_proj")
    attention = (
        _conv1d(width, 3 * width).below("c_attn")
        + _conv1d(width, width).below("c_proj")
        + Component(work=Work(flops_per_key=4 * width, saved=4 * width, saved_fp32=heads, products=width))
    )
    return (
        layer_norm(width).below("ln_1")
        + attention.below("attn")
        + layer_norm(width).below("ln_2")
        + mlp(up, down, ffn, config.config.get("activation_function", "gelu_new")).below("mlp")
    )


def _conv1d(inputs: int, outputs: int) -> Component:
    """A matrix with bias, stored (inputs, outputs).

    Source: transformers 5.23, `pytorch_utils.py`, `Conv1D`.
    """
    tensors = {"weight": (inputs, outputs), "bias": (outputs,)}
    return Component(tensors=tensors, work=linear(inputs, outputs).work)


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
    return assemble(
        "PhiForCausalLM", config, parts, num_layers=num_layers, width=width, tied=False,
        ignored_suffixes=ROTARY_BUFFERS,
    )  # fmt: skip


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
    part = mlp(up, down, ffn, config.config.get("hidden_act", "gelu_new"))
    return attention.below("self_attn") + part.below("mlp") + layer_norm(width).below("input_layernorm")


def phi3_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `Phi3ForCausalLM` (Phi-3, Phi-3.5 and Phi-4, mini and medium)."""
    width = config.count("hidden_size")
    return decoder("Phi3ForCausalLM", config, _phi3_block(config, width))


def _phi3_block(config: ConfigReader, width: int) -> Component:
    """A Llama's layer.

    Shapes: qkv_proj ((H + 2 K) h, D), o_proj (D, H h), gate_up_proj (2 F, D), down_proj (D, F).
    Kept: as `manifests.models.components.attention` and `gated_mlp`, attention's output in another order of memory too;
    with the values, all that qkv_proj returns. None of that remains, nor the keys, where they are repeated.
    """
    heads, kv_heads, size = _heads(config, width)
    ffn, keys = config.count("intermediate_size"), kv_heads * size
    replaced = 2 * width if kv_heads == heads else width + 3 * keys
    attention = (
        linear(width, width + 2 * keys).below("qkv_proj")
        + linear(width, width).below("o_proj")
        + Component(
            work=Work(
                flops_per_key=4 * width, saved=4 * width + 3 * keys, saved_fp32=heads, products=width, keys=replaced
            )
        )
    )
    gated = (
        linear(width, 2 * ffn).below("gate_up_proj")
        + linear(ffn, width).below("down_proj")
        + Component(work=Work(saved=4 * ffn))
    )
    return layer(attention, gated, width)


def _heads(config: ConfigReader, width: int) -> tuple[int, int, int]:
    """Return the query heads, the key-value heads and a head's width."""
    heads = config.divisor("num_attention_heads", "hidden_size", width)
    kv_heads = config.divisor("num_key_value_heads", "num_attention_heads", heads, heads)
    return heads, kv_heads, width // heads


def falcon_shape(config: ConfigReader) -> ModelShape:
    """Return the shape of a `FalconForCausalLM`: 7B, 40B and 180B's decoders, and Falcon-RW's."""
    config.expect("apply_residual_connection_post_layernorm", False)
    width, vocab = config.count("hidden_size"), config.count("vocab_size")
    num_layers = config.count("num_hidden_layers", most=MAX_LAYERS)
    block = _falcon_block(config, width)
    parts = {
        "transformer.word_embeddings": embedding(vocab, width),
        **{f"transformer.h.{index}": block for index in range(num_layers)},
        "transformer.ln_f": layer_norm(width),
        HEAD: head(width, vocab),
    }
    ignored = (".self_attention.rotary_emb.inv_freq",)
    return assemble(
        "FalconForCausalLM", config, parts, num_layers=num_layers, width=width, tied=True, ignored_suffixes=ignored
    )


def _falcon_block(config: ConfigReader, width: int) -> Component:
    bias, ffn = config.flag("bias", False), config.count("ffn_hidden_size", 4 * width)
    up = linear(width, ffn, bias=bias).below("dense_h_to_4h")
    down = linear(ffn, width, bias=bias).below("dense_4h_to_h")
    part = mlp(up, down, ffn, config.config.get("activation", "gelu"))
    block = _falcon_attention(config, width, bias=bias).below("self_attention") + part.below("mlp")
    for name in _falcon_norms(config):
        block += layer_norm(width).below(name)
    return block


def _falcon_attention(config: ConfigReader, width: int, *, bias: bool) -> Component:
    """Attention.

    Shapes: query_key_value ((H + 2 K) h, D), dense (D, D). K = 1 in 7B (`multi_query`), H in Falcon-RW.
    Kept: queries, keys, values, output, and the softmax's sum for each head. The new decoder copies keys and
    values for every head. No fused attention takes one head of keys for several of queries as they are: torch computes
    the softmax then, in float32, and keeps copies of all three for every head.
    """
    heads = config.divisor("num_attention_heads", "hidden_size", width)
    is_new = config.flag("new_decoder_architecture", False)
    kv_heads = 1 if config.flag("multi_query", True) else heads
    if is_new:
        kv_heads = config.divisor("num_kv_heads", "num_attention_heads", heads, heads)
    work = Work(flops_per_key=4 * width, saved=4 * width, saved_fp32=heads, products=width)
    if not is_new and kv_heads < heads:
        work += Work(saved_fp32=3 * width - heads, softmaxes=heads) - Work(saved=3 * width)
    return (
        linear(width, (heads + 2 * kv_heads) * (width // heads), bias=bias).below("query_key_value")
        + linear(width, width, bias=bias).below("dense")
        + Component(work=work)
    )


def _falcon_norms(config: ConfigReader) -> tuple[str, ...]:
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
    block = _mpt_block(config, width)
    parts = {
        "transformer.wte": embedding(vocab, width),
        **{f"transformer.blocks.{index}": block for index in range(num_layers)},
        "transformer.norm_f": layer_norm(width, bias=False),
        HEAD: head(width, vocab),
    }
    return assemble("MptForCausalLM", config, parts, num_layers=num_layers, width=width, tied=True)


def _mpt_block(config: ConfigReader, width: int) -> Component:
    """A layer: norm, attention, norm, MLP.

    Shapes: Wqkv (3 D, D), out_proj (D, D), up_proj (4 D, D), down_proj (D, 4 D).
    Kept by attention, which is several operations: queries, keys, values, output, and the softmax.
    """
    heads, ffn = config.divisor("n_heads", "d_model", width), 4 * width
    attention = (
        linear(width, 3 * width).below("Wqkv")
        + linear(width, width).below("out_proj")
        + Component(work=Work(flops_per_key=4 * width, saved=4 * width, softmaxes=heads, products=width))
    )
    return (
        layer_norm(width, bias=False).below("norm_1")
        + attention.below("attn")
        + layer_norm(width, bias=False).below("norm_2")
        + mlp(linear(width, ffn).below("up_proj"), linear(ffn, width).below("down_proj"), ffn).below("ffn")
    )


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
    block = _opt_block(config, width, affine=affine)
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
    return assemble("OPTForCausalLM", config, modules, num_layers=num_layers, width=width, tied=True, base="model.")


def _opt_block(config: ConfigReader, width: int, *, affine: bool) -> Component:
    """A layer: attention and MLP, and a norm before or after either.

    Shapes: q_proj, k_proj, v_proj and out_proj (D, D), fc1 (F, D), fc2 (D, F).
    Kept by attention: queries, keys, values, output, and the softmax's sum for each head.
    """
    heads = config.divisor("num_attention_heads", "hidden_size", width)
    ffn, bias = config.count("ffn_dim"), config.flag("enable_bias", True)
    block = Component(work=Work(flops_per_key=4 * width, saved=4 * width, saved_fp32=heads, products=width))
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        block += linear(width, width, bias=bias).below(f"self_attn.{name}")
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        block += layer_norm(width, weight=affine, bias=affine).below(name)
    up, down = linear(width, ffn, bias=bias).below("fc1"), linear(ffn, width, bias=bias).below("fc2")
    return block + mlp(up, down, ffn, config.config.get("activation_function", "relu"))
