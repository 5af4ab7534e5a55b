"""Layers compiled by torch.compile, each by itself."""

from __future__ import annotations

from collections.abc import Iterable

from runner.pipeline.chunk import StageChunk
from runner.pipeline.parts import layers_of

__all__ = ["compile_layers"]


def compile_layers(chunks: Iterable[StageChunk]) -> None:
    """Compile every layer when it first runs; all of one kind share what was compiled.

    In place, so that no name changes. Shapes are taken as they come: each length of sequence is
    compiled anew, and so is evaluation.
    """
    for chunk in chunks:
        for _, layer in layers_of(chunk):
            layer.compile(dynamic=False)
