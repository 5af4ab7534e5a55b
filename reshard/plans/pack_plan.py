"""The plan: which bytes go where. Pure; another file moves them."""

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
from reshard.layout.model import Layout
from reshard.tensors.checkpoint import Checkpoint, TensorAt
from reshard.tensors.lazy import stored_nbytes
from reshard.tensors.slices import slices_of

__all__ = ["OutputShard", "PackPlan", "StagePlan", "Traffic", "lay_out_shard", "plan_pack", "traffic_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputShard:
    """A shard to be written: `entries[i]` gets the bytes of `origins[i]`, `header` stands before them.

    Both are made when they are asked for, since a plan may have a million tensors, unless they are `given`: those of
    a shard that carries no digests. The header of one that does is a template of the final length.
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
        """Each tensor, in the order of their bytes, and where it begins in the file."""
        if self.given is None:  # one after the other
            ends = accumulate((origin.nbytes for origin in self.origins), initial=self.header_nbytes)
            return zip(self.origins, ends, strict=False)
        pairs = sorted(zip(self.given[1], self.origins, strict=True), key=lambda pair: (pair[0].begin, pair[0].end))
        return ((origin, self.header_nbytes + entry.begin) for entry, origin in pairs)

    def header_with(self, digests: Mapping[str, str]) -> bytes:
        """Return the header with the hex digests of the tensors' bytes, by name, if it carries any."""
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
    nbytes = template_nbytes(_kinds_of(tensors), _metadata(tensors))
    return OutputShard(path=path, origins=tuple(tensors), header_nbytes=nbytes, holds=holds)


def _kinds_of(tensors: Sequence[TensorAt]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    return ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)


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
        raise LayoutError("layout", f"no stage holds the module of {fqn!r}", code="layout.uncovered-module")
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
