"""The plan of a pack: which bytes go where. Pure; `reshard.copy` executes it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count

from manifests.brief import brief
from manifests.errors import LayoutError
from manifests.index import MAX_SHARD_NBYTES, is_indexed, replicas_elsewhere, split_by_size
from manifests.models import ModelShape, module_of
from manifests.paths import replicas_path, root_shard_path, shard_path
from manifests.safetensors import (
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    TensorEntry,
    header_template,
    in_data_order,
    layout_tensors,
    parse_header,
)
from manifests.schema import WEIGHTS, Holds, TieGroup, TieMember
from manifests.slices import Slice, slice_metadata
from reshard.estimate.costs import params_of
from reshard.layouts.model import StageLayout
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.lazy import stored_nbytes
from reshard.tensors.slices import slices_of
from stores.bundles import TensorAt

_MAX_TENSORS = 150_000  # of a shard: readers accept so many JSON values in a header


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How bundles are divided into shards of at most `max_nbytes` of tensors; a larger tensor is alone in its shard.

    Whole weights are in the root (see Note [A packed folder is a Hugging Face folder]), or `in_stage_folders`.
    """

    max_nbytes: int = MAX_SHARD_NBYTES
    in_stage_folders: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenHeader:
    """A header of its own for a shard, or none (of files other than safetensors).

    `order` numbers its tensors by their offsets; None: they are in that order.
    """

    header_text: bytes | None
    order: tuple[int, ...] | None

    @property
    def header(self) -> bytes:
        if self.header_text is None:
            return b""
        return len(self.header_text).to_bytes(LENGTH_NBYTES, "little") + self.header_text


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputShard:
    """A shard to write: its header, then the bytes of its tensors.

    A shard with a `given` header has no digests; that of the others is a template of the final length until their
    digests are known.
    """

    path: str
    origins: tuple[TensorAt, ...]  # as the header orders them
    header_nbytes: int
    given: GivenHeader | None = None
    holds: Holds = WEIGHTS

    @property
    def is_indexed(self) -> bool:
        """Whether the Hugging Face index lists its tensors."""
        return is_indexed(self.holds, self.path)

    @property
    def with_digests(self) -> bool:
        return self.given is None

    @property
    def entries(self) -> Sequence[TensorEntry]:
        if self.given is None:
            return _lay_out(self.origins)
        assert self.given.header_text is not None, "of safetensors files"
        return parse_header(self.given.header_text, data_nbytes=None, where=self.path).tensors

    @property
    def header(self) -> bytes:
        return self.header_with(None)

    @property
    def nbytes(self) -> int:
        return self.header_nbytes + sum(origin.nbytes for origin in self.origins)

    @property
    def in_data_order(self) -> Sequence[TensorAt]:
        """The tensors in the order of their bytes, which follow each other from the end of the header on."""
        if self.given is None or self.given.order is None:
            return self.origins
        return [self.origins[number] for number in self.given.order]

    @property
    def placed(self) -> Iterator[tuple[TensorAt, int]]:
        """Each tensor, in the order of their bytes, with its position in the file."""
        tensors = self.in_data_order
        ends = accumulate((origin.nbytes for origin in tensors), initial=self.header_nbytes)
        return zip(tensors, ends, strict=False)

    def header_with(self, digests: Sequence[str] | None) -> bytes:
        """Return the header with the tensors' hex digests, in order, if this shard has digests; None: with zeros."""
        if self.given is not None:
            return self.given.header
        names = (origin.name for origin in self.origins)
        by_name = None if digests is None else dict(zip(names, digests, strict=True))
        header = header_template(_lay_out(self.origins), _metadata(self.origins), by_name)
        assert len(header) == self.header_nbytes, f"{self.path}: the tensors would begin elsewhere"
        return header


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """A stage and its shards: its index, its rank, its place among the stages of that rank, and its modules.

    Units: `nbytes` in bytes of weights.
    """

    index: int
    rank: int
    virtual: int
    modules: tuple[str, ...]
    num_params: int
    nbytes: int
    shards: tuple[OutputShard, ...]

    __repr__ = brief

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
    again_nbytes: int
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


def plan_pack(checkpoint: Checkpoint, layout: StageLayout, sharding: Sharding) -> PackPlan:
    """Assign every tensor of a checkpoint to the stage that owns its module, and optimizer state to its weights' stage.

    A tied FQN that a stage requires and the checkpoint does not store becomes a copy of the stored one. Slices are
    copied as they are, in folders of their stages, unless the checkpoint says to merge them.
    """
    stage_of = {module: index for index, modules in enumerate(layout.stages) for module in modules}
    ties = tuple(_tie_group(group, checkpoint, stage_of) for group in checkpoint.shape.ties)
    kinds: dict[Holds, Mapping[str, TensorAt]] = {WEIGHTS: checkpoint.tensors, **checkpoint.moments}
    bundles = {holds: _by_stage(tensors, ties, stage_of, len(layout.stages)) for holds, tensors in kinds.items()}
    shards = _lay_out_bundles(bundles, ties, sharding, merged=checkpoint.merges_slices)
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
                shards=shards[index],
            )
            for index, modules in enumerate(layout.stages)
        ),
        ties=ties,
    )


def with_header(path: str, tensors: Sequence[TensorAt], text: bytes, entries: Sequence[TensorEntry]) -> OutputShard:
    """Plan a shard whose header has this text, with an entry for each tensor."""
    is_ordered = in_data_order(entries) is entries
    order = None if is_ordered else sorted(range(len(entries)), key=lambda n: (entries[n].begin, entries[n].end))
    given = GivenHeader(header_text=text, order=order if order is None else tuple(order))
    return OutputShard(path=path, origins=tuple(tensors), header_nbytes=len(given.header), given=given)


def without_header(path: str, tensors: Sequence[TensorAt]) -> OutputShard:
    """Plan a file of these bytes alone, one after the other."""
    given = GivenHeader(header_text=None, order=None)
    return OutputShard(path=path, origins=tuple(tensors), header_nbytes=0, given=given)


def lay_out_shard(path: str, tensors: Sequence[TensorAt], holds: Holds = WEIGHTS) -> OutputShard:
    """Plan a shard of consecutive tensors, with space for their digests."""
    nbytes = len(header_template(_lay_out(tensors), _metadata(tensors)))
    return OutputShard(path=path, origins=tuple(tensors), header_nbytes=nbytes, holds=holds)


def _lay_out(tensors: Sequence[TensorAt]) -> tuple[TensorEntry, ...]:
    return layout_tensors((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)


def _lay_out_bundles(
    bundles: Mapping[Holds, Sequence[Sequence[TensorAt]]], ties: Sequence[TieGroup], sharding: Sharding, *, merged: bool
) -> list[tuple[OutputShard, ...]]:
    """Return each stage's shards: weights, then optimizer state."""
    weights = bundles[WEIGHTS]
    is_sliced = not merged and any(len(slices_of(tensor)) > 1 for tensors in weights for tensor in tensors)
    in_root = not is_sliced and not sharding.in_stage_folders
    shards = _in_root(weights, replicas_elsewhere(ties), sharding) if in_root else [[] for _ in weights]
    for holds, by_stage in bundles.items():
        if holds != WEIGHTS or not in_root:
            for stage, tensors in enumerate(by_stage):
                shards[stage] += _in_stage_folder(stage, tensors, holds, sharding, merged=merged)
    return list(map(tuple, shards))


def _in_root(
    weights: Sequence[Sequence[TensorAt]], replicas: Collection[str], sharding: Sharding
) -> list[list[OutputShard]]:
    """Return each stage's shards of whole weights, numbered over all stages; `replicas` are in a shard of their own."""
    runs = [
        split_by_size((tensor for tensor in tensors if tensor.name not in replicas), _nbytes_of, sharding.max_nbytes)
        for tensors in weights
    ]
    shards = [[shard for run in of_stage for shard in lay_out_readable(run)] for of_stage in runs]
    numbers, total = count(), sum(map(len, shards))
    shards = [[replace(shard, path=root_shard_path(next(numbers), total)) for shard in of_stage] for of_stage in shards]
    for stage, tensors in enumerate(weights):
        if apart := [tensor for tensor in tensors if tensor.name in replicas]:
            shards[stage].append(lay_out_shard(replicas_path(stage), apart))
    return shards


def _in_stage_folder(
    stage: int, tensors: Sequence[TensorAt], holds: Holds, sharding: Sharding, *, merged: bool
) -> Iterator[OutputShard]:
    """Yield shards of whole tensors; or one for each slice of the tensor that has most of them, whole ones first."""
    split = [] if merged else [slices_of(tensor) for tensor in tensors]
    num_slices = max(map(len, split), default=0)
    if num_slices > 1:
        shards = [[slices[number] for slices in split if number < len(slices)] for number in range(num_slices)]
    else:
        shards = split_by_size(tensors, _nbytes_of, sharding.max_nbytes)
    readable = [shard for contents in shards for shard in lay_out_readable(contents, holds)]
    for number, shard in enumerate(readable):
        yield replace(shard, path=shard_path(stage, holds, number=number, of=len(readable)))


def lay_out_readable(tensors: Sequence[TensorAt], holds: Holds = WEIGHTS) -> Iterator[OutputShard]:
    """Plan one shard, or as many as their headers need to be no longer than readers accept; without paths."""
    shard = lay_out_shard("", tensors, holds)
    is_readable = shard.header_nbytes <= MAX_HEADER_NBYTES and len(tensors) <= _MAX_TENSORS
    if is_readable or len(tensors) == 1:
        yield shard
        return
    middle = len(tensors) // 2
    for half in (tensors[:middle], tensors[middle:]):
        yield from lay_out_readable(half, holds)


def lay_out_root(tensors: Iterable[TensorAt]) -> list[OutputShard]:
    """Plan whole tensors into numbered shards in the root of a folder, in order."""
    runs = split_by_size(tensors, _nbytes_of, MAX_SHARD_NBYTES)
    shards = [shard for run in runs for shard in lay_out_readable(run)]
    return [replace(shard, path=root_shard_path(at, len(shards))) for at, shard in enumerate(shards)]


def _nbytes_of(tensor: TensorAt) -> int:
    return tensor.nbytes


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
    """Return each stage's tensors; a replica on a stage of its own that is not stored becomes a copy of its owner.

    A kind of optimizer state that the owner does not have, its replicas do not have either.
    """
    bundles: list[list[TensorAt]] = [[] for _ in range(num_stages)]
    for tensor in tensors.values():
        bundles[_stage_of(tensor.name, stage_of)].append(tensor)
    for tie in ties:
        for member in tie.replicas:
            if member.fqn not in tensors and member.stage != tie.owner.stage and tie.owner.fqn in tensors:
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
