"""Tied weights: several parameters, on one rank or on many, that behave as one.

# Note [Ties across stages]
Every rank that holds a member of a tie group keeps a copy of the weight. On one rank all members
share the copy's storage and have gradients of their own; the first of them leads. After the backward
the leader's gradient becomes the sum over all members of all ranks, so every copy takes the same
optimizer step. The norm counts the group once, on the rank of its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch import nn

from manifests.digest import digest_bytes
from manifests.errors import InputError, RankError
from manifests.placement import Placement
from manifests.schema import TieGroup
from runner.chunk import NamedParameter, StageChunk, named_hf_parameters

__all__ = ["Tie", "build_ties", "check_equal", "check_loaded", "lead_parameters", "sync_gradients"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tie:
    """A tie group as one of its ranks sees it."""

    fqn: str  # the owner's: the group goes by it
    members: tuple[nn.Parameter, ...]  # on this rank, the leader first; one storage
    ranks: tuple[int, ...]  # of the pipeline, ascending: those with a member
    is_counted_here: bool  # in the gradient's norm
    group: dist.ProcessGroup | None = None  # of `ranks`; None when there is one

    @property
    def leader(self) -> nn.Parameter:
        return self.members[0]


def check_loaded(groups: Iterable[TieGroup], chunks: Sequence[StageChunk]) -> None:
    """Make sure that the copies of a tied weight that this rank has read are equal; no collective.

    Raises:
        InputError: naming two that differ.
    """
    found = _by_name(chunks)
    for group in groups:
        keys = [(member.fqn, member.stage) for member in group.members if (member.fqn, member.stage) in found]
        for key in keys[1:]:
            if not torch.equal(found[key], found[keys[0]]):
                raise InputError(
                    f"tied weight {group.owner.fqn}",
                    f"{keys[0][0]} on stage {keys[0][1]} and {key[0]} on stage {key[1]} hold different values",
                    "the bundles disagree; pack the source again",
                )


def build_ties(
    groups: Iterable[TieGroup],
    chunks: Sequence[StageChunk],
    placement: Placement,
    timeout: timedelta,
    pipeline: dist.ProcessGroup | None = None,
) -> tuple[Tie, ...]:
    """Tie this rank's parameters, which are loaded, and give the groups that it is part of.

    Every rank calls this with the same groups: it creates a process group for each that spans ranks.
    A replica takes over the values of the first member on its rank.
    """
    found = _by_name(chunks)
    ties = []
    for group in groups:
        members = tuple(
            found[member.fqn, member.stage] for member in group.members if (member.fqn, member.stage) in found
        )
        ranks = tuple(sorted({placement.rank_of(member.stage) for member in group.members}))
        process_group = _process_group(ranks, timeout, pipeline) if len(ranks) > 1 else None
        if not members:
            continue
        for replica in members[1:]:
            replica.data = members[0].data
        owner_here = (group.owner.fqn, group.owner.stage) in found
        ties.append(
            Tie(
                fqn=group.owner.fqn,
                members=members,
                ranks=ranks,
                is_counted_here=owner_here,
                group=process_group,
            )
        )
    return tuple(ties)


def lead_parameters(chunks: Sequence[StageChunk], ties: Sequence[Tie]) -> tuple[NamedParameter, ...]:
    """Give the parameters that this rank's optimizer steps, with their FQNs: each storage once."""
    led = {id(member) for tie in ties for member in tie.members[1:]}
    return tuple(
        (fqn, parameter)
        for chunk in chunks
        for fqn, parameter in named_hf_parameters(chunk)
        if id(parameter) not in led
    )


def sync_gradients(ties: Sequence[Tie]) -> None:
    """Make each leader's gradient the sum over its group; the other members' become None.

    Every rank of a group calls this after the backward and before the norm. A member without a
    gradient counts as zeros.
    """
    for tie in ties:
        leader = tie.leader
        if leader.grad is None:
            leader.grad = torch.zeros_like(leader)
        for member in tie.members[1:]:
            if member.grad is not None:
                leader.grad += member.grad
                member.grad = None
        if tie.group is not None:
            dist.all_reduce(leader.grad, group=tie.group)


def check_equal(
    ties: Sequence[Tie],
    pipeline: dist.ProcessGroup | None = None,
    *,
    of: Callable[[nn.Parameter], torch.Tensor] = lambda weight: weight,
) -> None:
    """Make sure that all copies of each tied weight, or of what `of` gives for it, hold the same bytes.

    Every rank of the pipeline calls this.

    Raises:
        RankError: on all ranks alike, naming the weight and the ranks that differ.
    """
    if not dist.is_initialized():
        return
    mine = {tie.fqn: _digest(of(tie.leader)) for tie in ties if tie.group is not None}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(pipeline))]
    dist.all_gather_object(everyone, mine, group=pipeline)
    for fqn in sorted({fqn for digests in everyone for fqn in digests}):
        holders = {rank: digests[fqn] for rank, digests in enumerate(everyone) if fqn in digests}
        if len(set(holders.values())) > 1:
            shown = ", ".join(f"rank {rank} {digest[:23]}…" for rank, digest in holders.items())
            raise RankError(
                fqn,
                f"the copies of this tied weight differ: {shown}",
                "if this is the first step, the bundles disagree: pack the source again",
            )


def _by_name(chunks: Sequence[StageChunk]) -> dict[tuple[str, int], nn.Parameter]:
    return {(fqn, chunk.stage): parameter for chunk in chunks for fqn, parameter in named_hf_parameters(chunk)}


def _process_group(
    ranks: Sequence[int], timeout: timedelta, pipeline: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    global_ranks = [dist.get_global_rank(pipeline, rank) if pipeline else rank for rank in ranks]
    # A new group does not take over the world's timeout.
    group: dist.ProcessGroup | None = dist.new_group(global_ranks, timeout=timeout)
    return group


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return digest_bytes(flat.numpy().data)
