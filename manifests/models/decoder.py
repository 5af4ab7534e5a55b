"""A decoder put together: embedding, layers, norm, head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from manifests.models.components import Component, linear, norm
from manifests.models.config import ConfigReader
from manifests.models.shape import ModelShape, Work

EMBEDDING, LAYER, NORM, HEAD = "model.embed_tokens", "model.layers.{}", "model.norm", "lm_head"
# Rotary frequencies: what files of older code have in every layer, and models compute.
ROTARY_BUFFERS = (".self_attn.rotary_emb.inv_freq",)


def decoder(
    architecture: str,
    config: ConfigReader,
    layers: Sequence[Component],
    mtp: Sequence[Component] = (),
    *,
    tied_unless_said: bool = False,
) -> ModelShape:
    """Return the shape of a decoder with these layers and, numbered after them, these MTP layers.

    Shapes: embedding (V, D).
    Source: `LlamaModel`, `LlamaForCausalLM`.
    """
    width, vocab = config.count("hidden_size"), config.count("vocab_size")
    names = [LAYER.format(index) for index in range(len(layers) + len(mtp))]
    parts = {
        EMBEDDING: embedding(vocab, width),
        **dict(zip(names, (*layers, *mtp), strict=True)),
        NORM: norm(width),
        HEAD: head(width, vocab),
    }
    shape = assemble(architecture, parts, num_layers=len(layers), hidden_size=width)
    tied = config.flag("tie_word_embeddings", tied_unless_said)
    return replace(
        shape,
        ties=head_tie(EMBEDDING) if tied else (),
        ignored_suffixes=ROTARY_BUFFERS,
        optional=frozenset(names[len(layers) :]),
    )


def assemble(architecture: str, parts: Mapping[str, Component], *, num_layers: int, hidden_size: int) -> ModelShape:
    """Return the shape of a model of these modules, in the order they run; nothing is tied."""
    return ModelShape(
        architecture=architecture,
        num_layers=num_layers,
        modules=tuple(parts),
        tensors={f"{module}.{leaf}": shape for module, part in parts.items() for leaf, shape in part.tensors.items()},
        work={module: part.work for module, part in parts.items()},
        hidden_size=hidden_size,
    )


def embedding(rows: int, width: int) -> Component:
    """A table. A row of it is looked up, which costs no product and keeps nothing."""
    return Component(tensors={"weight": (rows, width)})


def head_tie(module: str) -> tuple[tuple[str, ...], ...]:
    """Tie the head to an embedding."""
    return ((f"{module}.weight", f"{HEAD}.weight"),)


def head(width: int, vocab: int, *, bias: bool = False) -> Component:
    """The vocabulary head and the cross-entropy after it.

    Shapes: (V, D), bias (V).
    Kept: its logits, and their log-probabilities in float32.
    Source: `LlamaForCausalLM`; `torch.nn.functional.cross_entropy`.
    """
    return linear(width, vocab, bias=bias) + Component(work=Work(saved=vocab, saved_fp32=vocab))
