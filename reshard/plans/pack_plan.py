"""The plan of a pack: which bytes go where. Pure; `reshard.copy` executes it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from manifests.errors import LayoutError
from manifests.models import ModelShape, module_of
from manifests.paths import shard_path
from manifests.safetensors import TensorEntry, header_template, layout_tensors, template_nbytes
from manifests.schema import WEIGHTS, Holds, TieGroup, TieMember
from manifests.slices import Slice, slice_metadata
from reshard.estimate.costs import params_of
from reshard.layout.model import StageLayout
from reshard.tensors.checkpoint import Checkpoint, TensorAt
from reshard.tensors.lazy import stored_nbytes
from reshard.tensors.slices import slices_of

__all__ = ["OutputShard", "PackPlan", "StagePlan", "Traffic", "lay_out_shard", "plan_pack", "traffic_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputShard:
    """A shard to write: its `header`, then the bytes of `origins[i]` at `entries[i]`.

    Header and entries are computed on demand, since a plan may have a million tensors, unless they are `given`: then
    the shard has no digests. The header of a shard with digests is a template of the final length.
    """

    path: str
    origins: tuple[TensorAt, ...]
    header_nbytes: int
    given: tuple[bytes, tuple[TensorEntry, ...]] | None = None
    holds: Holds = WEIGHTS

    @property
    def with_digests(self) -> bool:
        return self.given is None

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return layout_tensors(_kinds_of(self.origins)) if self.given is None else self.given[1]

    @property
    def header(self) -> bytes:
        return header_template(self.entries, _metadata(self.origins)) if self.given is None else self.given[0]

    @property
    def nbytes(self) -> int:
        return self.header_nbytes + sum(origin.nbytes for origin in self.origins)

    @property
    def placed(self) -> Iterator[tuple[TensorAt, int]]:
        """Each tensor, in the order of their bytes, with its position in the file."""
        if self.given is None:  # consecutive
            ends = accumulate((origin.nbytes for origin in self.origins), initial=self.header_nbytes)
            return zip(self.origins, ends, strict=False)
        pairs = sorted(zip(self.given[1], self.origins, strict=True), key=lambda pair: (pair[0].begin, pair[0].end))
        return ((origin, self.header_nbytes + entry.begin) for entry, origin in pairs)

    def header_with(self, digests: Mapping[str, str]) -> bytes:
        """Return the header with the tensors' hex digests, given by name, if this shard has digests."""
        return self.header if self.given else header_template(self.entries, _metadata(self.origins), digests)


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
        return len({origin.name for shard in self.shards if shard.holds == WEIGHTS for origin in shard.origins})


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPlan:
    """Every stage's shards."""

    layout: StageLayout
    stages: tuple[StagePlan, ...]
    ties: tuple[TieGroup, ...]

    def shards_on(self, stages: Collection[int] | None = None) -> tuple[OutputShard, ...]:
        """Return the shards of these stages; None: of all."""
        return tuple(
            shard for stage in self.stages if stages is None or stage.index in stages for shard in stage.shards
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes of tensors that a pack reads, as files store them, and bytes of shards that it writes.

    A tied tensor is read once for each copy that is written; `again_nbytes` are read a second time.
    """

    once_nbytes: int
    again_nbytes: int = 0
    write_nbytes: int

    @property
    def read_nbytes(self) -> int:
        return self.once_nbytes + self.again_nbytes


def traffic_of(shards: Iterable[OutputShard], again: Iterable[TensorAt] = ()) -> Traffic:
    """Return the bytes to read and write for shards, if some tensors are read `again`."""
    shards = tuple(shards)
    return Traffic(
        once_nbytes=sum(stored_nbytes(origin) for shard in shards for origin in shard.origins),
        again_nbytes=sum(map(stored_nbytes, again)),
        write_nbytes=sum(shard.nbytes for shard in shards),
    )


def plan_pack(checkpoint: Checkpoint, layout: StageLayout) -> PackPlan:
    """Assign every tensor of a checkpoint to the stage that owns its module, and optimizer state to its weights' stage.

    A tied FQN that a stage requires and the checkpoint does not store becomes a copy of the stored one. Slices are
    copied as they are, unless the checkpoint says to merge them.

    Raises:
        LayoutError: a tensor belongs to no module of the layout.
    """
    stage_of = {module: index for index, modules in enumerate(layout.stages) for module in modules}
    ties = tuple(_tie_group(group, checkpoint, stage_of) for group in checkpoint.shape.ties)
    kinds: dict[Holds, Mapping[str, TensorAt]] = {WEIGHTS: checkpoint.tensors, **checkpoint.moments}
    bundles = {holds: _by_stage(tensors, ties, stage_of, len(layout.stages)) for holds, tensors in kinds.items()}
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
                nbytes=sum(tensor.nbytes for tensor in bundles[WEIGHTS][index]),
                shards=tuple(
                    shard
                    for holds, by_stage in bundles.items()
                    for shard in _lay_out_bundle(index, by_stage[index], holds, merged=checkpoint.merges_slices)
                ),
            )
            for index, modules in enumerate(layout.stages)
        ),
        ties=ties,
    )


def lay_out_shard(path: str, tensors: Sequence[TensorAt], holds: Holds = WEIGHTS) -> OutputShard:
    """Plan a shard of consecutive tensors, with space for their digests."""
    nbytes = template_nbytes(_kinds_of(tensors), _metadata(tensors))
    return OutputShard(path=path, origins=tuple(tensors), header_nbytes=nbytes, holds=holds)


def _kinds_of(tensors: Sequence[TensorAt]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    return ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)


def _lay_out_bundle(stage: int, tensors: Sequence[TensorAt], holds: Holds, *, merged: bool) -> Iterable[OutputShard]:
    """Yield one shard, or one for each slice of the tensor that has most of them; whole tensors are in the first."""
    if merged:
        shards = [list(tensors)] if tensors else []
    else:
        split = [slices_of(tensor) for tensor in tensors]
        numbers = range(max(map(len, split), default=0))
        shards = [[slices[number] for slices in split if number < len(slices)] for number in numbers]
    for number, contents in enumerate(shards):
        yield lay_out_shard(shard_path(stage, holds, number=number, of=len(shards)), contents, holds)


def _metadata(tensors: Sequence[TensorAt]) -> Mapping[str, str]:
    """Return the header's metadata about slices, if the shard has any."""
    if all(tensor.part is None for tensor in tensors):
        return {}
    slices = {}
    for tensor in tensors:
        all_of_it = Slice(offset=tensor.offset, shape=tensor.shape, whole_shape=tensor.whole_shape)
        slices[tensor.name] = tensor.part or all_of_it
    return slice_metadata(slices)


def _by_stage(
    tensors: Mapping[str, TensorAt], ties: Sequence[TieGroup], stage_of: Mapping[str, int], num_stages: int
) -> list[list[TensorAt]]:
    """Return each stage's tensors; a replica on a stage of its own that is not stored becomes a copy of its owner."""
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
        raise LayoutError("layout", f"no stage has the module of {fqn!r}", code="layout.uncovered-module")
    return stage_of[module]


def _tie_group(group: tuple[str, ...], checkpoint: Checkpoint, stage_of: Mapping[str, int]) -> TieGroup:
    """Return the group with its owner: the first FQN that is stored. The source was checked to store one."""
    owner = next(fqn for fqn in group if fqn in checkpoint.tensors)
    replicas = tuple(TieMember(fqn=fqn, stage=_stage_of(fqn, stage_of)) for fqn in group if fqn != owner)
    return TieGroup(owner=TieMember(fqn=owner, stage=_stage_of(owner, stage_of)), replicas=replicas)


def _doubled_params(shape: ModelShape, ties: Sequence[TieGroup], num_stages: int) -> list[int]:
    """Count the parameters that each stage's modules name twice: two tied names on one stage are one parameter."""
    doubled = [0] * num_stages
    for tie in ties:
        stages = [member.stage for member in tie.members]
        for position, member in enumerate(tie.members):
            if member.stage in stages[:position]:
                doubled[member.stage] += shape.count_params(member.fqn)
    return doubled
