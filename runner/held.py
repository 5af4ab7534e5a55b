"""What a rank holds of the model in training, as a checkpoint stores it; and copies of it on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from manifests.schema import MOMENTS, WEIGHTS, Holds, TieGroup
from runner.chunk import StageChunk, named_hf_parameters
from runner.optim import Optimizer
from runner.pages import empty_like
from runner.ties import Tie

__all__ = ["Held", "HostCopy", "held_state", "held_weights", "nbytes_of"]

_CPU = torch.device("cpu")

# By stage, then by kind, then by Hugging Face FQN.
Held = Mapping[int, Mapping[Holds, Mapping[str, torch.Tensor]]]


def held_weights(chunks: Sequence[StageChunk], groups: Iterable[TieGroup]) -> Held:
    """Give a rank's weights; a replica on its owner's stage is left to its owner."""
    named = _stored(chunks, groups)
    return {stage: {WEIGHTS: {fqn: weight.detach() for fqn, weight in named[stage].items()}} for stage in named}


def held_state(
    chunks: Sequence[StageChunk], groups: Iterable[TieGroup], ties: Sequence[Tie], optimizer: Optimizer
) -> Held:
    """Give a rank's weights and moments; a member of a tie group has those of the one that leads."""
    leaders = {id(member): tie.leader for tie in ties for member in tie.members}
    return {
        stage: {
            WEIGHTS: {fqn: weight.detach() for fqn, weight in weights.items()},
            **{
                moment: {fqn: optimizer.moment(leaders.get(id(w), w), moment) for fqn, w in weights.items()}
                for moment in MOMENTS
            },
        }
        for stage, weights in _stored(chunks, groups).items()
    }


class HostCopy:
    """Memory on the host as large as what a rank holds, to be filled anew for each checkpoint.

    It is page-locked where the tensors are on a GPU, and touched beforehand where they are not, so that
    filling it takes as long as copying memory does.
    """

    def __init__(self, held: Held) -> None:
        self._copies = {
            stage: {kind: {fqn: _room_for(tensor) for fqn, tensor in named.items()} for kind, named in kinds.items()}
            for stage, kinds in held.items()
        }

    def fill(self, held: Held) -> Held:
        """Copy everything, and give the copies; the next call overwrites them."""
        is_on_gpu = False
        for stage, kinds in held.items():
            for kind, named in kinds.items():
                for fqn, tensor in named.items():
                    self._copies[stage][kind][fqn].copy_(tensor, non_blocking=True)
                    is_on_gpu |= tensor.is_cuda
        if is_on_gpu:
            torch.cuda.synchronize()
        return self._copies


def nbytes_of(held: Held) -> int:
    return sum(tensor.nbytes for kinds in held.values() for named in kinds.values() for tensor in named.values())


def _stored(chunks: Sequence[StageChunk], groups: Iterable[TieGroup]) -> dict[int, dict[str, torch.nn.Parameter]]:
    left_out = {replica.fqn for group in groups for replica in group.replicas if replica.stage == group.owner.stage}
    return {
        chunk.stage: {fqn: weight for fqn, weight in named_hf_parameters(chunk) if fqn not in left_out}
        for chunk in chunks
    }


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return empty_like(tensor, _CPU).zero_()
