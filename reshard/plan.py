"""The plan: which bytes go where. Pure; another file moves them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from manifests.errors import InputError
from manifests.models import ModelShape, module_of
from manifests.paths import shard_path
from manifests.safetensors import TensorEntry, header_template, layout_tensors
from manifests.schema import WEIGHTS, Holds, TieGroup, TieMember
from manifests.slices import Slice, slice_metadata
from reshard.checkpoint import Checkpoint, TensorAt
from reshard.costs import params_of
from reshard.derived import stored_nbytes
from reshard.layout.model import Layout
from reshard.slices import slices_of

__all__ = ["OutputShard", "PackPlan", "StagePlan", "Traffic", "lay_out_shard", "plan_pack", "traffic_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputShard:
    """A shard to be written: `entries[i]` gets the bytes of `origins[i]`, `header` stands before them.

    The header of a shard that carries digests is a template of the final length.
    """

    path: str
    header: bytes
    entries: tuple[TensorEntry, ...]
    origins: tuple[TensorAt, ...]
    with_digests: bool
    holds: Holds = WEIGHTS

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)

    def header_with(self, digests: Mapping[str, str]) -> bytes:
        """Give the header with the hex digests of the tensors' bytes, by name, if it carries any."""
        return header_template(self.entries, _metadata(self.origins), digests) if self.with_digests else self.header


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """A stage and its shards; `nbytes` counts its weights."""

    index: int
    rank: int
    virtual: int
    modules: tuple[str, ...]
    num_params: int
    nbytes: int
    shards: tuple[OutputShard, ...]

    @property
    def num_tensors(self) -> int:
        return len({entry.name for shard in self.shards if shard.holds == WEIGHTS for entry in shard.entries})


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPlan:
    """Every stage's shards."""

    layout: Layout
    stages: tuple[StagePlan, ...]
    ties: tuple[TieGroup, ...]

    def shards_on(self, stages: Collection[int] | None = None) -> tuple[OutputShard, ...]:
        """Give the shards of these stages; None: of all."""
        return tuple(
            shard for stage in self.stages if stages is None or stage.index in stages for shard in stage.shards
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes of tensors that a pack reads, as files store them, and bytes of shards that it writes.

    A tied tensor is read once for each copy that is written; `again_nbytes` are read once more than that.
    """

    once_nbytes: int
    again_nbytes: int = 0
    write_nbytes: int

    @property
    def read_nbytes(self) -> int:
        return self.once_nbytes + self.again_nbytes


def traffic_of(shards: Iterable[OutputShard], again: Iterable[TensorAt] = ()) -> Traffic:
    """Count what it takes to write shards when some tensors are read `again`."""
    shards = tuple(shards)
    return Traffic(
        once_nbytes=sum(stored_nbytes(origin) for shard in shards for origin in shard.origins),
        again_nbytes=sum(map(stored_nbytes, again)),
        write_nbytes=sum(shard.nbytes for shard in shards),
    )


def plan_pack(checkpoint: Checkpoint, layout: Layout) -> PackPlan:
    """Lay every tensor of a checkpoint onto the stage that owns its module, and moments beside their weights.

    A tied FQN that its stage needs and nobody stores there becomes a copy of the one that is stored. Slices
    travel as they are, unless the checkpoint says to merge them.

    Raises:
        InputError: a tensor belongs to no module of the layout.
    """
    stage_of = {module: index for index, modules in enumerate(layout.stages) for module in modules}
    ties = tuple(_tie_group(group, checkpoint, stage_of) for group in checkpoint.shape.ties)
    kinds: dict[Holds, Mapping[str, TensorAt]] = {WEIGHTS: checkpoint.tensors, **checkpoint.moments}
    dealt = {holds: _deal_out(tensors, ties, stage_of, len(layout.stages)) for holds, tensors in kinds.items()}
    placement, params = layout.placement, params_of(checkpoint.shape)
    doubled = _doubled_params(checkpoint.shape, ties, placement.num_stages)
    return PackPlan(
        layout=layout,
        stages=tuple(
            StagePlan(
                index=index,
                rank=placement.rank_of(index),
                virtual=placement.virtual_of(index),
                modules=modules,
                num_params=sum(params[module] for module in modules) - doubled[index],
                nbytes=sum(tensor.nbytes for tensor in dealt[WEIGHTS][index]),
                shards=tuple(
                    shard
                    for holds, bundles in dealt.items()
                    for shard in _lay_out_bundle(index, bundles[index], holds, merged=checkpoint.merges_slices)
                ),
            )
            for index, modules in enumerate(layout.stages)
        ),
        ties=ties,
    )


def lay_out_shard(path: str, tensors: Sequence[TensorAt], holds: Holds = WEIGHTS) -> OutputShard:
    """Lay tensors one after the other in a shard of ours, with room for their digests."""
    entries = layout_tensors((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    return OutputShard(
        path=path,
        header=header_template(entries, _metadata(tensors)),
        entries=entries,
        origins=tuple(tensors),
        with_digests=True,
        holds=holds,
    )


def _lay_out_bundle(stage: int, tensors: Sequence[TensorAt], holds: Holds, *, merged: bool) -> Iterable[OutputShard]:
    """Give one shard, or one for each slice of the tensor that has most of them; whole tensors are in the first."""
    if merged:
        shards = [list(tensors)] if tensors else []
    else:
        split = [slices_of(tensor) for tensor in tensors]
        numbers = range(max(map(len, split), default=0))
        shards = [[slices[number] for slices in split if number < len(slices)] for number in numbers]
    for number, held in enumerate(shards):
        yield lay_out_shard(shard_path(stage, holds, number=number, of=len(shards)), held, holds)


def _metadata(tensors: Sequence[TensorAt]) -> Mapping[str, str]:
    """Give what a shard's header says of slices, if it holds any."""
    if all(tensor.part is None for tensor in tensors):
        return {}
    slices = {}
    for tensor in tensors:
        all_of_it = Slice(offset=tensor.offset, shape=tensor.shape, whole_shape=tensor.whole_shape)
        slices[tensor.name] = tensor.part or all_of_it
    return slice_metadata(slices)


def _deal_out(
    tensors: Mapping[str, TensorAt], ties: Sequence[TieGroup], stage_of: Mapping[str, int], num_stages: int
) -> list[list[TensorAt]]:
    """Give each stage's tensors; a replica that has to be stored and nobody stores is a copy of its owner."""
    bundles: list[list[TensorAt]] = [[] for _ in range(num_stages)]
    for tensor in tensors.values():
        bundles[_stage_of(tensor.name, stage_of)].append(tensor)
    for tie in ties:
        for member in tie.replicas:
            if member.fqn not in tensors and member.stage != tie.owner.stage:
                bundles[member.stage].append(replace(tensors[tie.owner.fqn], name=member.fqn))
    return bundles


def _stage_of(fqn: str, stage_of: Mapping[str, int]) -> int:
    module = module_of(fqn, stage_of)
    if module is None:
        raise InputError("layout", f"no stage holds the module of {fqn!r}")
    return stage_of[module]


def _tie_group(group: tuple[str, ...], checkpoint: Checkpoint, stage_of: Mapping[str, int]) -> TieGroup:
    """Give the group with its owner in front: the first FQN that is stored (coverage saw to one)."""
    owner = next(fqn for fqn in group if fqn in checkpoint.tensors)
    replicas = tuple(TieMember(fqn=fqn, stage=_stage_of(fqn, stage_of)) for fqn in group if fqn != owner)
    return TieGroup(owner=TieMember(fqn=owner, stage=_stage_of(owner, stage_of)), replicas=replicas)


def _doubled_params(shape: ModelShape, ties: Sequence[TieGroup], num_stages: int) -> list[int]:
    """Count what each stage's modules name twice: two tied names on one stage are one parameter."""
    doubled = [0] * num_stages
    for tie in ties:
        stages = [member.stage for member in tie.members]
        for position, member in enumerate(tie.members):
            if member.stage in stages[:position]:
                doubled[member.stage] += shape.count_params(member.fqn)
    return doubled
