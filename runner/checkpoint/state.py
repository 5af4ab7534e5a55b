"""The training state of a rank, as a checkpoint stores it; and copies of it in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from manifests.schema import MOMENTS, WEIGHTS, Holds, TieGroup
from runner.pipeline.chunk import StageChunk, hf_constants, hf_pieces
from runner.tensors.dtensor import whole_of
from runner.tensors.huge_pages import empty_like
from runner.tensors.local_shard import Piece, join_pieces
from runner.training.mixed_precision import kept
from runner.training.optimizer import Optimizer
from runner.training.ties import Tie

_CPU = torch.device("cpu")

# By stage, then by kind; of one kind, a piece for each Hugging Face FQN.
Held = Mapping[int, Mapping[Holds, tuple[Piece, ...]]]
_Chosen = Callable[[torch.Tensor], bool]


def held_weights(
    chunks: Sequence[StageChunk], groups: Iterable[TieGroup], is_written_here: _Chosen = lambda weight: True
) -> Held:
    """Return a rank's weights, including those that are not trained; a tied replica on its owner's stage is left out.

    `is_written_here` chooses one of the ranks that have the same part of a parameter.
    """
    left_out = _left_out(groups)
    return {
        chunk.stage: {
            WEIGHTS: (
                *_pieces(chunk, left_out, lambda weight: kept(weight) if is_written_here(weight) else None),
                *(piece for piece in hf_constants(chunk) if is_written_here(piece.memory)),
            )
        }
        for chunk in chunks
    }


def whole_weights(chunks: Sequence[StageChunk], groups: Iterable[TieGroup], *, is_writer: bool) -> Held:
    """Return the whole weights of a rank's stages, gathered from the ranks that share them, in host memory.

    Every one of these ranks calls this; those that are not the stage's writer get none. As `held_weights` otherwise.
    """
    left_out = _left_out(groups)

    def gather(weight: nn.Parameter) -> torch.Tensor | None:
        whole = whole_of(kept(weight))
        return whole.cpu() if is_writer else None

    return {
        chunk.stage: {
            WEIGHTS: (*_pieces(chunk, left_out, gather), *(hf_constants(chunk) if is_writer else ())),
        }
        for chunk in chunks
    }


def held_state(
    chunks: Sequence[StageChunk],
    groups: Iterable[TieGroup],
    ties: Sequence[Tie],
    optimizer: Optimizer,
    is_written_here: _Chosen = lambda weight: True,
) -> Held:
    """Return a rank's weights and optimizer state; members of a tie group have that of their leader."""
    leaders = {id(member): tie.leader for tie in ties for member in tie.members}
    left_out = _left_out(groups)

    def moment_of(weight: nn.Parameter, moment: Holds) -> torch.Tensor | None:
        return optimizer.moment(leaders.get(id(weight), weight), moment) if is_written_here(weight) else None

    weights = held_weights(chunks, groups, is_written_here)
    return {
        chunk.stage: {
            **weights[chunk.stage],
            **{moment: _pieces(chunk, left_out, partial(moment_of, moment=moment)) for moment in MOMENTS},
        }
        for chunk in chunks
    }


class HostCopy:
    """Host memory for a copy of a rank's state, reused for each checkpoint.

    It is pinned memory where the tensors are on a GPU, and touched beforehand where they are not, so that
    filling it takes no longer than copying.
    """

    def __init__(self, held: Held) -> None:
        self._copies: Held = {
            stage: {
                kind: tuple(replace(piece, memory=_empty_like(piece.memory)) for piece in pieces)
                for kind, pieces in kinds.items()
            }
            for stage, kinds in held.items()
        }

    def fill(self, held: Held) -> Held:
        """Copy everything, and return the copies; the next call overwrites them."""
        is_on_gpu = False
        for stage, kinds in held.items():
            for kind, pieces in kinds.items():
                for piece, copy in zip(pieces, self._copies[stage][kind], strict=True):
                    copy.memory.copy_(piece.memory, non_blocking=True)
                    is_on_gpu |= piece.memory.is_cuda
        if is_on_gpu:
            torch.cuda.synchronize()
        return self._copies


def nbytes_of(held: Held) -> int:
    return sum(piece.memory.nbytes for kinds in held.values() for pieces in kinds.values() for piece in pieces)


def _left_out(groups: Iterable[TieGroup]) -> frozenset[str]:
    return frozenset(
        replica.fqn for group in groups for replica in group.replicas if replica.stage == group.owner.stage
    )


def _pieces(
    chunk: StageChunk, left_out: frozenset[str], of: Callable[[nn.Parameter], torch.Tensor | None]
) -> tuple[Piece, ...]:
    return join_pieces(piece for piece in hf_pieces(chunk, of) if piece.fqn not in left_out)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return empty_like(tensor, _CPU).zero_()
