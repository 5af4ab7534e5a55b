"""How a rank's stages compute: what is computed again, compiled, or cut up. Done once they have their weights."""

from __future__ import annotations

from collections.abc import Sequence

from runner.pipeline.chunk import StageChunk
from runner.recipe import ComputeOptions
from runner.training.activations import recompute_layers
from runner.training.compiled import compile_layers
from runner.training.head import chunk_head

__all__ = ["arrange"]


def arrange(chunks: Sequence[StageChunk], num_stages: int, options: ComputeOptions) -> None:
    """Let stages compute as was asked for. What is computed again is compiled with the rest of its layer.

    Raises:
        UsageError: see `runner.training.head.chunk_head`.
    """
    recompute_layers(chunks, options.recompute)
    if options.is_compiled:
        compile_layers(chunks)
    if options.loss_chunk is not None:
        chunk_head(chunks, num_stages, options.loss_chunk)
