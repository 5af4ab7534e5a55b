"""A stage's modules by their Hugging Face names, in whatever form a family has built them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from manifests.models import module_of
from runner.pipeline.chunk import StageChunk

__all__ = ["layers_of", "part_of"]


def part_of(chunk: StageChunk, module: str) -> nn.Module:
    """Give the part of a chunk's body that is the module of this name, such as `lm_head`."""
    names = [
        name.split(".")[:-1]
        for name, _ in chunk.body.named_parameters()
        if module_of(chunk.family.to_hf(name), chunk.module_names) == module
    ]
    assert names, module
    common = [parts[0] for parts in zip(*names, strict=False) if len(set(parts)) == 1]
    return chunk.body.get_submodule(".".join(common))


def layers_of(chunk: StageChunk) -> Iterator[tuple[int, nn.Module]]:
    """Give a chunk's decoder layers, numbered as in the whole model."""
    for module in chunk.module_names:
        number = module.rpartition(".")[2]
        if number.isdecimal():
            yield int(number), part_of(chunk, module)
