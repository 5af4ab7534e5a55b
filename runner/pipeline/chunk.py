"""One stage's modules, built empty, and its parameters under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runner.dimensions.shards import local_of, local_offset
from runner.families import Family
from runner.loading.pages import empty_like
from runner.loading.pieces import Piece
from runner.pipeline.codec import Crossing

if TYPE_CHECKING:
    from runner.training.head import ChunkedHead

__all__ = [
    "NamedParameter",
    "StageChunk",
    "build_chunks",
    "hf_constants",
    "hf_pieces",
    "materialize",
    "named_hf_parameters",
]

# Under its Hugging Face FQN; one that is made of several tensors, under the first one's.
NamedParameter = tuple[str, nn.Parameter]


class StageChunk(nn.Module):
    """The modules of one stage: what the stage before hands on goes in (see `runner.pipeline.wire`).

    A stage without modules hands on what it gets. In a pipeline, `crossing` says how what comes and
    goes is taken apart into tensors.
    """

    def __init__(self, family: Family, stage: int, modules: tuple[str, ...]) -> None:
        super().__init__()
        self.family, self.stage, self.module_names = family, stage, modules
        self.body = family.build(modules)
        self.device = torch.device("meta")
        self.crossing: Crossing | None = None
        self.head: ChunkedHead | None = None  # where logits are made a few tokens at a time

    def forward(self, *arrived: Any) -> Any:
        if self.crossing is None:
            (given,) = arrived
            return self.body(given) if self.module_names else given
        given = self.crossing.arriving.unpack(arrived)
        return self.crossing.leaving.pack(self.body(given) if self.module_names else given, arrived)


def build_chunks(
    family: Family, stage_modules: Sequence[tuple[str, ...]], stages: Iterable[int]
) -> tuple[StageChunk, ...]:
    """Build these stages, and no others, on the meta device; `stage_modules` lists every stage's."""
    return tuple(StageChunk(family, stage, stage_modules[stage]) for stage in stages)


def materialize(chunk: StageChunk, *, device: torch.device, dtype: torch.dtype) -> None:
    """Give a chunk memory on `device`: parameters of `dtype`, not yet filled, and computed buffers."""
    chunk.to(dtype)
    chunk._apply(lambda tensor: empty_like(tensor, device))  # type: ignore[no-untyped-call] # as to_empty does
    chunk.device = device
    chunk.family.init_buffers(chunk.body, device)


def named_hf_parameters(chunk: StageChunk) -> Iterator[NamedParameter]:
    """Give each parameter of a chunk with its Hugging Face FQN, numbered as in the whole model."""
    for name, parameter in chunk.body.named_parameters():
        yield chunk.family.to_hf(name), parameter


def hf_pieces(
    chunk: StageChunk, of: Callable[[nn.Parameter], torch.Tensor | None] = lambda weight: weight
) -> Iterator[Piece]:
    """Give what lies here of a chunk's parameters, or of what `of` gives for each, as parts of Hugging Face tensors."""
    for name, parameter in chunk.body.named_parameters():
        tensor = of(parameter)
        if tensor is not None and local_of(tensor).numel():
            yield from chunk.family.pieces(name, local_of(tensor).detach(), local_offset(tensor))


def hf_constants(chunk: StageChunk) -> Iterator[Piece]:
    """Give a chunk's buffers that files hold, as Hugging Face tensors: they are loaded and saved, and never trained.

    Every rank that shares the chunk has all of them.
    """
    for prefix, module in chunk.body.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield from chunk.family.pieces(f"{prefix}.{name}".lstrip("."), buffer, (0,) * buffer.dim())
