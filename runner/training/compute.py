"""How a rank's stages compute: what is computed again, compiled, or cut up. Done once they have their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.config.schema import ComputeOptions
from runner.pipeline.chunk import StageChunk, layers_of
from runner.pipeline.heads import chunk_head
from runner.training.activation_checkpoint import recompute_layers

__all__ = ["arrange"]


def arrange(chunks: Sequence[StageChunk], num_stages: int, options: ComputeOptions) -> None:
    """Let stages compute as was asked for. What is computed again is compiled with the rest of its layer.

    Raises:
        UsageError: see `runner.pipeline.heads.chunk_head`.
    """
    recompute_layers(chunks, options.recompute)
    if options.is_compiled:
        _compile_layers(chunks)
    if options.loss_chunk is not None:
        chunk_head(chunks, num_stages, options.loss_chunk)


def _compile_layers(chunks: Iterable[StageChunk]) -> None:
    """Compile every layer when it first runs; all of one kind share what was compiled.

    In place, so that no name changes. Shapes are taken as they come: each length of sequence is
    compiled again, and so is evaluation.
    """
    for chunk in chunks:
        for _, layer in layers_of(chunk):
            layer.compile(dynamic=False)
