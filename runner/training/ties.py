"""Tied weights: several parameters, on one rank or on many, that behave as one.

# Note [Ties across stages]
Every rank that has a member of a tie group keeps one copy of the weight. On one rank all members
share the storage of the copy and have separate gradients; the first member is the leader. After the backward
the leader's gradient becomes the sum over all members on all ranks, so every copy takes the same
optimizer step. The gradient norm counts the group once, on the rank of its owner.

A rank that has nothing of a group but what it borrows (see Note [Borrowed weights] in mtp.py: a member of the owner's
name) does not step it: the owner sends the new value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch import nn

from manifests.errors import RankError, ShardError
from manifests.placement import Placement
from manifests.schema import TieGroup
from runner.distributed.fail_together import from_all_ranks
from runner.pipeline.chunk import NamedParameter, StageChunk, named_hf_parameters
from runner.tensors.dtensor import local_of, local_offset, mesh_dims
from runner.tensors.local_shard import digest_tensor
from runner.training.mixed_precision import master_of, share_master, zero_gradient


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tie:
    """A tie group as one of its ranks sees it."""

    fqn: str  # the owner's: the group goes by it
    members: tuple[nn.Parameter, ...]  # on this rank, the leader first; one storage
    ranks: tuple[int, ...]  # of the pipeline, ascending: those with a member
    is_counted_here: bool  # in the gradient's norm
    group: dist.ProcessGroup | None  # of `ranks`; None when there is one
    shares_storage: bool  # the members here; sharded ones cannot, and follow the leader by a copy
    lender: int | None  # the rank in `group` that sends the value to those that borrow it; None: none does
    is_borrowed: bool  # by this rank

    @property
    def leader(self) -> nn.Parameter:
        return self.members[0]


def check_loaded(groups: Iterable[TieGroup], chunks: Sequence[StageChunk]) -> None:
    """Check that the copies of a tied weight that this rank has read are equal; no collective."""
    parameters = _by_name(chunks)
    for group in groups:
        read = (group.owner, *(member for member in group.replicas if member.fqn != group.owner.fqn))  # not borrowed
        keys = [(member.fqn, member.stage) for member in read if (member.fqn, member.stage) in parameters]
        for key in keys[1:]:
            if not torch.equal(local_of(master_of(parameters[key])), local_of(master_of(parameters[keys[0]]))):
                raise ShardError(
                    f"tied weight {group.owner.fqn}",
                    f"{keys[0][0]} on stage {keys[0][1]} and {key[0]} on stage {key[1]} have different values",
                    "the bundles are inconsistent; pack the source again",
                    code="shard.tied-weights-differ",
                )


def build_ties(
    groups: Iterable[TieGroup],
    chunks: Sequence[StageChunk],
    placement: Placement,
    timeout: timedelta,
    pipelines: Sequence[Sequence[int]] | None = None,
) -> tuple[Tie, ...]:
    """Tie this rank's loaded parameters, and return the tie groups that it is part of.

    Every rank calls this with the same groups: it creates a process group for each one that spans ranks, in
    each of the `pipelines`, which list their ranks; None: all ranks are one pipeline.
    A replica takes the values of the first member on its rank.
    """
    parameters = _by_name(chunks)
    ties = []
    for group in groups:
        members = tuple(
            parameters[member.fqn, member.stage] for member in group.members if (member.fqn, member.stage) in parameters
        )
        ranks = tuple(sorted({placement.rank_of(member.stage) for member in group.members}))
        process_group: dist.ProcessGroup | None = None
        if len(ranks) > 1:  # a new group does not inherit the timeout of the world
            every = pipelines or (range(dist.get_world_size()),)
            of_pipelines = [[pipeline[rank] for rank in ranks] for pipeline in every]
            process_group, _ = dist.new_subgroups_by_enumeration(of_pipelines, timeout=timeout)  # type: ignore[no-untyped-call]
        if not members:
            continue
        shares_storage = not mesh_dims(members[0])
        for replica in members[1:] if shares_storage else ():
            replica.data = members[0].data
        share_master(members)
        owner_here = (group.owner.fqn, group.owner.stage) in parameters
        borrowers = {placement.rank_of(member.stage) for member in group.replicas if member.fqn == group.owner.fqn}
        owner_rank = placement.rank_of(group.owner.stage)
        ties.append(
            Tie(
                fqn=group.owner.fqn,
                members=members,
                ranks=ranks,
                is_counted_here=owner_here,
                group=process_group,
                shares_storage=shares_storage,
                lender=ranks.index(owner_rank) if borrowers - {owner_rank} else None,
                is_borrowed=not owner_here
                and all(
                    member.fqn == group.owner.fqn
                    for member in group.replicas
                    if (member.fqn, member.stage) in parameters
                ),
            )
        )
    return tuple(ties)


def follow_leaders(ties: Iterable[Tie]) -> None:
    """Copy the leader's new value to members that have a separate storage, and to ranks that borrow it."""
    for tie in ties:
        if tie.lender is not None:
            dist.broadcast(local_of(tie.leader.detach()), group=tie.group, group_src=tie.lender)
        if tie.is_borrowed:
            zero_gradient(tie.leader)  # as the optimizer does with what it steps
        for member in () if tie.shares_storage else tie.members[1:]:
            local_of(member.detach()).copy_(local_of(tie.leader.detach()))


def lead_parameters(chunks: Sequence[StageChunk], ties: Sequence[Tie]) -> tuple[NamedParameter, ...]:
    """Return the parameters that this rank's optimizer steps, with their FQNs: each storage once, and no frozen one."""
    led = {id(member) for tie in ties for member in tie.members[1:]}
    led |= {id(tie.leader) for tie in ties if tie.is_borrowed}
    led = led.union(*(chunk.frozen_ids() for chunk in chunks))
    return tuple(
        (fqn, parameter)
        for chunk in chunks
        for fqn, parameter in named_hf_parameters(chunk)
        if id(parameter) not in led
    )


def sync_gradients(ties: Sequence[Tie]) -> None:
    """Make each leader's gradient the sum over its group; the other members' become None.

    Every rank of a group calls this after the backward and before the norm. A member without a
    gradient counts as zeros. Ranks sum their parts of sharded members.
    """
    for tie in ties:
        leader = tie.leader
        if not leader.requires_grad:
            continue
        if leader.grad is None:
            leader.grad = torch.zeros_like(leader)
        total = local_of(leader.grad)
        for member in tie.members[1:]:
            if member.grad is not None:
                total += local_of(member.grad)
                zero_gradient(member)
        if tie.group is not None:
            dist.all_reduce(total, group=tie.group)


def check_equal(
    ties: Sequence[Tie],
    *,
    of: Callable[[nn.Parameter], torch.Tensor | None] = master_of,
) -> None:
    """Check that all copies of each tied weight (the master, or what `of` returns for it) have the same bytes.

    Every rank calls this. Ranks that have the same part of a weight are compared, over all pipelines.
    """
    tied = [(tie.fqn, of(tie.leader)) for tie in ties if tie.group is not None and tie.lender is None]
    mine = {(fqn, local_offset(tensor)): digest_tensor(local_of(tensor)) for fqn, tensor in tied if tensor is not None}
    everyone = from_all_ranks(mine)
    for key in sorted({key for digests in everyone for key in digests}):
        holders = {rank: digests[key] for rank, digests in enumerate(everyone) if key in digests}
        if len(set(holders.values())) > 1:
            shown = ", ".join(f"rank {rank} {digest[:23]}…" for rank, digest in holders.items())
            raise RankError(
                key[0],
                f"the copies of this tied weight differ: {shown}",
                "at the first step this means that the bundles are inconsistent: pack the source again",
                code="rank.tied-weights-differ",
            )


def _by_name(chunks: Sequence[StageChunk]) -> dict[tuple[str, int], nn.Parameter]:
    return {(fqn, chunk.stage): parameter for chunk in chunks for fqn, parameter in named_hf_parameters(chunk)}
