"""Activation checkpointing: layers keep their input, and recompute their activations in the backward."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from manifests.memory import Recompute
from runner.pipeline.chunk import StageChunk, layers_of

__all__ = ["recompute_layers"]

_aten = torch.ops.aten
# Results that `selective` saves, because recomputing them is slow. Everything between them is cheap.
_KEPT = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten.topk.default,  # of a router: the recomputed choice of experts must be the same
)


def recompute_layers(chunks: Iterable[StageChunk], recompute: Recompute) -> None:
    """Checkpoint every layer, every Nth layer, or all but matrix products and attention (`selective`).

    The forward of a layer is wrapped, not the layer: no parameter name changes, and hooks (FSDP's too) keep working.
    """
    if recompute == "none":
        return
    every = recompute if isinstance(recompute, int) else 1
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(_KEPT))
    for chunk in chunks:
        for number, layer in layers_of(chunk):
            if number % every == 0:
                layer.forward = partial(checkpoint, layer.forward, **options)
