"""What decoders are made of: each part's tensors as files store them, and its work for one token; and whole decoders.

Letters: D = width of the model, F = of a feed-forward, h = of a head; H and K = query and key-value heads;
E = experts, k of them for each token; V = vocabulary. A matrix that takes n inputs to m outputs is stored
(m, n) and costs a token 2 n m FLOPs.

Sources: the modules are those of transformers 5.23. FLOPs: Kaplan et al. 2020, "Scaling Laws for Neural
Language Models", 2.1 and table 1, without its approximations. Kept activations: Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", 4.1, for these modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from manifests.models.config import MAX_EXPERTS, MAX_LAYERS, ConfigReader
from manifests.models.shape import ModelShape, Shape, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Tensors, named relative to the part, and the work of one token."""

    tensors: Mapping[str, Shape] = field(default_factory=dict)
    work: Work = field(default_factory=Work)

    def __add__(self, other: Component) -> Component:
        return Component(tensors={**self.tensors, **other.tensors}, work=self.work + other.work)

    def below(self, name: str) -> Component:
        return Component(tensors={f"{name}.{leaf}": shape for leaf, shape in self.tensors.items()}, work=self.work)


def norm(width: int) -> Component:
    """RMS norm, in transformers several operations.

    Kept: its input in float32, a statistic, its input divided, and its output, which the matrices after it need.
    """
    work = Work(saved=2 * width, saved_fp32=width + 1, normed=width, whole=2 * width, whole_fp32=width)
    return Component(tensors={"weight": (width,)}, work=work)


def scaled_in_float32(shape: ModelShape) -> ModelShape:
    """Return the shape with RMS norms that multiply by their weights before they round, and keep their input divided
    in float32, too.
    """

    def scaled(work: Work) -> Work:
        return work + Work(saved_fp32=work.normed, whole_fp32=work.normed) - Work(saved=work.normed, whole=work.normed)

    return replace(shape, work={module: scaled(work) for module, work in shape.work.items()})


def norms_of(shapes: Mapping[str, Shape], width: int) -> Work:
    """Return what the norms of a layer with these tensors keep; layer norms, which have a bias, are one operation.

    At least two RMS norms are counted, whose results are among the inputs of matrices, and make up for what these
    leave out.
    """
    saved, exact, normed = 0, 0, 0
    for leaf, dims in shapes.items():
        name = leaf.removesuffix(".weight")
        parent, _, last = name.rpartition(".")
        if len(dims) != 1 or name == leaf or "norm" not in last:
            continue
        (size,) = dims
        rows, *_ = shapes.get(f"{parent}.{last[0]}_proj.weight", dims)
        elements = size if rows % size else rows  # of each head, if it is of queries or keys
        saved, normed = saved + elements, normed + width * (size == width)
        exact += 0 if f"{name}.bias" in shapes else elements
    normed = max(normed, 2 * width)
    return Work(
        saved=max(0, saved - 2 * width),
        saved_fp32=max(exact, 2 * width),
        normed=normed,
        whole=2 * normed,
        whole_fp32=min(normed, max(exact, 2 * width)),
    )


def layer_norm(width: int, *, weight: bool = True, bias: bool = True) -> Component:
    """Layer norm, in transformers one operation. Kept: its input, two statistics, and its output."""
    tensors: dict[str, Shape] = {"weight": (width,)} if weight else {}
    if bias:
        tensors["bias"] = (width,)
    return Component(tensors=tensors, work=Work(saved=2 * width, saved_fp32=2, normed=width, whole=2 * width))


def linear(inputs: int, outputs: int, *, bias: bool = False) -> Component:
    """A matrix, and its bias. Its input, which is kept, is counted where it is made."""
    tensors: dict[str, Shape] = {"weight": (outputs, inputs)}
    if bias:
        tensors["bias"] = (outputs,)
    return Component(tensors=tensors, work=Work(flops=2 * inputs * outputs, products=outputs))


def attention(
    config: ConfigReader,
    *,
    bias: bool,
    out_bias: bool | None = None,
    head: int | None = None,
    qk_norm: bool = False,
    of_head: Work | None = None,
) -> Component:
    """Attention in which groups of query heads share keys and values; `of_head` if it is several operations.

    `head` is how wide heads are of which the config says nothing; None: they share the model's width.

    Shapes: q_proj (H h, D), k_proj and v_proj (K h, D), o_proj (D, H h), q_norm and k_norm (h). `out_bias` is
    o_proj's; None: as the others'.
    FLOPs: the matrices, and 4 H h for each key: 2 H h for the score, 2 H h for the value's share.
    Kept: queries, keys, values, output, and the softmax's sum for each head.
    Source: `LlamaAttention`, `Qwen3Attention`; Ainslie et al. 2023, "GQA".
    """
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    head = config.count("head_dim", width // heads if head is None else head)
    if not head:
        problem = f"expected at most hidden_size {width}, found {heads}"
        raise config.error("num_attention_heads", problem, code="config.inconsistent-fields")
    kv_heads = config.divisor("num_key_value_heads", "num_attention_heads", heads, heads)
    queries, keys = heads * head, kv_heads * head
    part = linear(width, queries, bias=bias).below("q_proj")
    part += linear(width, keys, bias=bias).below("k_proj")
    part += linear(width, keys, bias=bias).below("v_proj")
    part += linear(queries, width, bias=bias if out_bias is None else out_bias).below("o_proj")
    if qk_norm:  # of each head: one weight for all, a statistic for each; their outputs are rotated, and not kept
        tensors: dict[str, Shape] = {"q_norm.weight": (head,), "k_norm.weight": (head,)}
        part += Component(
            tensors=tensors, work=Work(saved=queries + keys, saved_fp32=queries + keys + heads + kv_heads)
        )
    work = Work(flops_per_key=4 * queries, products=queries)
    if of_head is not None:  # keys and values are repeated then
        scores, softmaxes = heads * of_head.scores, heads * of_head.softmaxes
        return part + Component(
            work=work + Work(saved=4 * queries, keys=2 * queries, scores=scores, softmaxes=softmaxes)
        )
    return part + Component(work=work + Work(saved=2 * queries + 2 * keys, saved_fp32=heads, keys=2 * keys))


def gated_mlp(width: int, ffn: int, *, bias: bool = False) -> Component:
    """down(act(gate(x)) * up(x)).

    Shapes: gate_proj and up_proj (F, D), down_proj (D, F).
    Kept: gate, act(gate), up, and their product.
    Source: `LlamaMLP`; Shazeer 2020, "GLU Variants Improve Transformer".
    """
    part = linear(width, ffn, bias=bias).below("gate_proj")
    part += linear(width, ffn, bias=bias).below("up_proj")
    part += linear(ffn, width, bias=bias).below("down_proj")
    return part + Component(work=Work(saved=4 * ffn))


# Of transformers' activation functions, those that keep more than their input and result, or less.
_KEPT_BY_ACTIVATION = {"gelu_new": 5, "relu": 1}


def mlp(up: Component, down: Component, ffn: int, activation: object = "gelu") -> Component:
    """down(act(up(x))). Kept: up and act(up), of width F; all that a GELU of several operations needs.

    Source: transformers 5.23, `NewGELUActivation`.
    """
    return up + down + Component(work=Work(saved=_KEPT_BY_ACTIVATION.get(str(activation), 2) * ffn))


def routing(config: ConfigReader, num_experts: str) -> tuple[int, int]:
    """Return how many experts there are, under the field of this name, and how many of them a token goes through."""
    count = config.count(num_experts, most=MAX_EXPERTS)
    return count, config.count("num_experts_per_tok", most=count)


def experts(width: int, ffn: int, *, count: int, per_token: int) -> Component:
    """Experts and the router that chooses among them.

    Shapes: gate (E, D); experts.0, experts.1, ... as a gated MLP's.
    FLOPs: the router, and k experts.
    Kept: the router's logits and scores, and for each of the k experts its input, what a gated MLP keeps,
    and its output.
    Source: `Qwen3MoeSparseMoeBlock`, `DeepseekV3MoE`; Fedus et al. 2021, "Switch Transformers".
    """
    expert = gated_mlp(width, ffn)
    return Component(
        tensors={
            "gate.weight": (count, width),
            **{f"experts.{index}.{leaf}": shape for index in range(count) for leaf, shape in expert.tensors.items()},
        },
        work=expert_work(expert.work, width, count=count, per_token=per_token),
    )


def expert_work(expert: Work, width: int, *, count: int, per_token: int) -> Work:
    """Return the work of a router over `count` experts and of those that one token goes through."""
    return Work(
        flops=2 * width * count + per_token * expert.flops,
        saved=per_token * (expert.saved + 2 * width),
        saved_fp32=2 * count,
        products=per_token * expert.products,
    )


def layer(attention: Component, mlp: Component, width: int) -> Component:
    """A decoder layer: norm, attention, norm, MLP, each pair around a residual."""
    return (
        attention.below("self_attn")
        + mlp.below("mlp")
        + norm(width).below("input_layernorm")
        + norm(width).below("post_attention_layernorm")
    )


def mtp_parts(width: int) -> Component:
    """What an MTP layer has around its decoder layer."""
    inputs = norm(width).below("enorm") + norm(width).below("hnorm")
    return inputs + linear(2 * width, width).below("eh_proj") + norm(width).below("shared_head.norm")


Method = Callable[[ModelShape, ConfigReader], ModelShape]  # of quantization
NO_METHODS: Mapping[str, Method] = MappingProxyType({})
SOFTCAPPING = "final_logit_softcapping"  # of a config: logits are at most this, by a tanh
EMBEDDING, LAYER, NORM, HEAD = "model.embed_tokens", "model.layers.{}", "model.norm", "lm_head"
# Rotary frequencies: what files of older code have in every layer, and models compute.
ROTARY_BUFFERS = (".self_attn.rotary_emb.inv_freq",)


def decoder(
    architecture: str,
    config: ConfigReader,
    layers: Component | Sequence[Component],
    mtp: Sequence[Component] = (),
    *,
    tied_unless_said: bool = False,
    caps_logits: bool = False,
    methods: Mapping[str, Method] = NO_METHODS,
) -> ModelShape:
    """Return the shape of a decoder with these layers, or equal ones, and, numbered after them, these MTP layers.

    Shapes: embedding (V, D).
    Source: `LlamaModel`, `LlamaForCausalLM`.
    """
    width, vocab = config.count("hidden_size"), config.count("vocab_size")
    if isinstance(layers, Component):
        layers = [layers] * config.count("num_hidden_layers", most=MAX_LAYERS)
    names = [LAYER.format(index) for index in range(len(layers) + len(mtp))]
    parts = {
        EMBEDDING: embedding(vocab, width),
        **dict(zip(names, (*layers, *mtp), strict=True)),
        NORM: norm(width),
        HEAD: head(width, vocab, caps_logits=caps_logits),
    }
    return assemble(
        architecture,
        config,
        parts,
        num_layers=len(layers),
        width=width,
        tied=tied_unless_said,
        methods=methods,
        ignored_suffixes=ROTARY_BUFFERS,
        optional=frozenset(names[len(layers) :]),
    )


def assemble(
    architecture: str,
    config: ConfigReader,
    parts: Mapping[str, Component],
    *,
    num_layers: int,
    width: int,
    tied: bool,
    methods: Mapping[str, Method] = NO_METHODS,
    **fields: Any,
) -> ModelShape:
    """Return the shape of a model of these modules, in the order they run: an embedding first, the head last.

    The two are tied if the config says so, or says nothing and `tied` is set; `fields` are more of the shape's.
    """
    shape = ModelShape(
        architecture=architecture,
        num_layers=num_layers,
        modules=tuple(parts),
        tensors={f"{module}.{leaf}": shape for module, part in parts.items() for leaf, shape in part.tensors.items()},
        work={module: part.work for module, part in parts.items()},
        hidden_size=width,
        ties=((f"{next(iter(parts))}.weight", f"{HEAD}.weight"),) if config.flag("tie_word_embeddings", tied) else (),
        **fields,
    )
    return _as_stored(shape, config, methods)


def embedding(rows: int, width: int) -> Component:
    """A table. A row of it is looked up, which costs no product and keeps nothing."""
    return Component(tensors={"weight": (rows, width)})


def head(width: int, vocab: int, *, bias: bool = False, caps_logits: bool = False) -> Component:
    """The vocabulary head and the cross-entropy after it.

    Shapes: (V, D), bias (V).
    Kept: its logits, the tanh that caps them, and their log-probabilities in float32.
    Source: `LlamaForCausalLM`; `torch.nn.functional.cross_entropy`.
    """
    saved = 2 * vocab if caps_logits else vocab
    return linear(width, vocab, bias=bias) + Component(work=Work(saved=saved, saved_fp32=vocab))


MXFP4_BLOCK = 32  # values that share a scale


def _as_stored(shape: ModelShape, config: ConfigReader, methods: Mapping[str, Method]) -> ModelShape:
    """Return the shape of a model whose config may say `quantization_config`."""
    section = config.section("quantization_config")
    if section is None:
        return shape
    method = section.config.get("quant_method")
    if not isinstance(method, str) or method not in methods:
        hint = f"supported for {shape.architecture}: {', '.join(methods) or 'none; dequantize the weights first'}"
        raise section.error(
            "quant_method", f"{method!r} is not supported", hint, code="config.unsupported-quantization"
        )
    return methods[method](shape, section)


def fp8(shape: ModelShape, section: ConfigReader) -> ModelShape:
    """Store linear weights in float8, each with one scale for every block of it.

    The router, embeddings, norms, head and an MTP layer's own projection stay as they are, and so do the
    modules that `modules_to_not_convert` names, whole or from a dot on.
    Shapes: `weight_scale_inv` (ceil(m / 128), ceil(n / 128)) for a weight (m, n) and blocks of 128 x 128.
    Source: deepseek-ai/DeepSeek-V3, `README_WEIGHTS.md`; transformers 5.23, `FP8Linear`,
        `should_convert_module`.
    """
    section.expect("activation_scheme", "dynamic")
    block = section.counts("weight_block_size")
    if len(block) != 2 or 0 in block:
        problem = f"expected two positive integers, found {list(block)}"
        raise section.error("weight_block_size", problem, code="config.invalid-field")
    unquantized = {*section.names("modules_to_not_convert"), *section.names("ignored_layers")}
    if odd := sorted(name for name in unquantized if not re.fullmatch(r"[\w.]+", name)):
        problem = f"{odd[0]!r} is not the name of a module"
        hint = "patterns are not supported"
        raise section.error("modules_to_not_convert", problem, hint, code="config.unsupported-field")
    tensors, scales = dict[str, Shape](), dict[Shape, Shape]()  # one object for all of a shape: there may be a million
    for fqn, dims in shape.tensors.items():
        tensors[fqn] = dims
        if _is_linear(fqn, dims) and not (unquantized and unquantized & _dotted_parts(fqn.removesuffix(".weight"))):
            if dims not in scales:
                scales[dims] = (-(-dims[0] // block[0]), -(-dims[1] // block[1]))
            tensors[f"{fqn}_scale_inv"] = scales[dims]
    return replace(
        shape,
        tensors=tensors,
        untrained_suffixes=(*shape.untrained_suffixes, ".weight_scale_inv"),
    )


def mxfp4(shape: ModelShape, section: ConfigReader) -> ModelShape:
    """Store experts as 4-bit floats, two in a byte, with one scale for every 32 of them.

    Shapes: `gate_up_proj_blocks` (E, 2 F, D / 32, 16) and `gate_up_proj_scales` (E, 2 F, D / 32) for
    `gate_up_proj` (E, D, 2 F); `down_proj` (E, F, D) likewise.
    Source: openai/gpt-oss, `gpt_oss/torch/weights.py`; transformers 5.23, `integrations/mxfp4.py`;
        OCP Microscaling Formats, version 1.0.
    """
    tensors: dict[str, Shape] = {}
    for fqn, dims in shape.tensors.items():
        if not fqn.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors[fqn] = dims
            continue
        count, inputs, outputs = dims
        if inputs % MXFP4_BLOCK:
            problem = f"mxfp4 requires widths that 32 divides, {fqn} has {inputs}"
            raise section.error("quant_method", problem, code="config.inconsistent-fields")
        tensors[f"{fqn}_blocks"] = (count, outputs, inputs // MXFP4_BLOCK, MXFP4_BLOCK // 2)
        tensors[f"{fqn}_scales"] = (count, outputs, inputs // MXFP4_BLOCK)
    return replace(
        shape,
        tensors=tensors,
        untrained_suffixes=(*shape.untrained_suffixes, "_proj_scales"),
        packed_suffixes=(*shape.packed_suffixes, "_proj_blocks"),
    )


def _is_linear(fqn: str, dims: Shape) -> bool:
    """Return whether this is one of a layer's linear weights, the router's excepted."""
    in_layer = ".self_attn." in fqn or ".mlp." in fqn
    return in_layer and len(dims) == 2 and not fqn.endswith(".mlp.gate.weight")


def _dotted_parts(module: str) -> set[str]:
    """Return a module's name, those of the modules around it, and their endings from a dot on."""
    words = module.split(".")
    cuts = range(1, len(words))
    return {module, *(".".join(words[:cut]) for cut in cuts), *(".".join(words[cut:]) for cut in cuts)}
