"""Apply activation checkpointing, torch.compile and the chunked loss to stages that have their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.config.schema import ComputeOptions
from runner.pipeline.chunk import StageChunk, layers_of
from runner.pipeline.heads import chunk_head
from runner.training.activation_checkpoint import recompute_layers


def apply_compute_options(chunks: Sequence[StageChunk], num_stages: int, options: ComputeOptions) -> None:
    """Apply the compute options to stages. A checkpointed layer is compiled as a whole.

    Raises:
        UsageError: see `runner.pipeline.heads.chunk_head`.
    """
    recompute_layers(chunks, options.recompute)
    if options.is_compiled:
        _compile_layers(chunks)
    if options.loss_chunk is not None:
        chunk_head(chunks, num_stages, options.loss_chunk)


def _compile_layers(chunks: Iterable[StageChunk]) -> None:
    """Compile every layer when it first runs; layers of one kind share the compiled code.

    In place, so that no parameter name changes. Shapes are static: each sequence length is compiled separately,
    and so is evaluation.
    """
    for chunk in chunks:
        for _, layer in layers_of(chunk):
            layer.compile(dynamic=False)
