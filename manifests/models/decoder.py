"""A decoder put together: embedding, layers, norm, head."""

from __future__ import annotations

from collections.abc import Sequence

from manifests.models.config import ConfigReader
from manifests.models.parts import Part, linear, norm
from manifests.models.shape import ModelShape, Work

__all__ = ["decoder", "head"]

EMBEDDING, LAYER, NORM, HEAD = "model.embed_tokens", "model.layers.{}", "model.norm", "lm_head"


def decoder(architecture: str, config: ConfigReader, layers: Sequence[Part], mtp: Sequence[Part] = ()) -> ModelShape:
    """Give the shape of a decoder with these layers and, numbered after them, these MTP layers.

    Shapes: embedding (V, D). A row of it is looked up, which costs no product and keeps nothing.
    Source: `LlamaModel`, `LlamaForCausalLM`.
    """
    width, vocab = config.count("hidden_size"), config.count("vocab_size")
    names = [LAYER.format(index) for index in range(len(layers) + len(mtp))]
    embedding = Part(tensors={"weight": (vocab, width)})
    parts = {EMBEDDING: embedding, **dict(zip(names, (*layers, *mtp), strict=True)), NORM: norm(width)}
    parts[HEAD] = head(width, vocab)
    return ModelShape(
        architecture=architecture,
        num_layers=len(layers),
        modules=tuple(parts),
        tensors={f"{module}.{leaf}": shape for module, part in parts.items() for leaf, shape in part.tensors.items()},
        ties=((f"{EMBEDDING}.weight", f"{HEAD}.weight"),) if config.flag("tie_word_embeddings", False) else (),
        optional=frozenset(names[len(layers) :]),
        work={module: part.work for module, part in parts.items()},
        hidden_size=width,
    )


def head(width: int, vocab: int) -> Part:
    """The vocabulary head and the cross-entropy after it.

    Shapes: (V, D).
    Kept: its logits, and their log-probabilities in float32.
    Source: `LlamaForCausalLM`; `torch.nn.functional.cross_entropy`.
    """
    return linear(width, vocab) + Part(work=Work(saved=vocab, saved_fp32=vocab))
