"""One stage's modules, built empty, and its parameters under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from runner.families import Family
from runner.pages import empty_like
from runner.pieces import Piece

__all__ = ["NamedParameter", "StageChunk", "build_chunks", "hf_pieces", "materialize", "named_hf_parameters"]

# Under its Hugging Face FQN; one that is made of several tensors, under the first one's.
NamedParameter = tuple[str, nn.Parameter]


class StageChunk(nn.Module):
    """The modules of one stage: one tensor in, one tensor out (see `runner.wire`).

    A stage without modules hands on what it gets.
    """

    def __init__(self, family: Family, stage: int, modules: tuple[str, ...]) -> None:
        super().__init__()
        self.family, self.stage, self.module_names = family, stage, modules
        self.body = family.build(modules)
        self.device = torch.device("meta")

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        # The pipeline takes gradients from a stage's input and output: they may not be one tensor.
        handed_on: torch.Tensor = self.body(tensor) if self.module_names else tensor.clone()
        return handed_on


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


def hf_pieces(chunk: StageChunk, of: Callable[[nn.Parameter], torch.Tensor] = lambda weight: weight) -> Iterator[Piece]:
    """Give a chunk's parameters, or what `of` gives for each, as the Hugging Face tensors that they are."""
    for name, parameter in chunk.body.named_parameters():
        yield from chunk.family.pieces(name, of(parameter).detach(), (0,) * parameter.dim())
