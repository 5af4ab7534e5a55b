"""A manifest as a source: the tensors of its bundles, each FQN once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from manifests.errors import InputError, ManifestError, Parameter, ShardError
from manifests.index import INDEX_NAME
from manifests.invariants import SOURCE_FILES, SOURCE_NAME, as_packed, check_model
from manifests.models import ModelShape, is_sized_by_files, model_shape, module_of
from manifests.models.adapters import has_adapters
from manifests.models.config import CONFIG_NAME
from manifests.optimizer_state import kinds_of, state_shapes, stored_kinds
from manifests.safetensors import in_data_order
from manifests.schema import (
    GIT_ATTRIBUTES_NAME,
    MODEL_CARD_NAME,
    WEIGHTS,
    AuxiliaryFile,
    Holds,
    Manifest,
    OptimizerState,
    Stage,
    StateKind,
)
from manifests.store import file_digest
from manifests.trained import TRAINED_NAME, decode_trained
from reshard.copy.engine import hash_tensors
from reshard.formats.auxiliary import has_section, without_section
from reshard.formats.table import OpenOptions
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint, OriginalFiles
from reshard.tensors.comparison import check_coverage, trained_part, without_absent
from reshard.tensors.lazy import MemoryFile
from reshard.tensors.slices import merge_slices, slices_of
from reshard.tensors.source_index import SourceRecord, decode_record
from stores.base import Folder, read_config, read_whole
from stores.bundles import Bundles, TensorAt, join_slices
from stores.local import LocalFolder
from stores.open import ReadManifest, open_manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """What a manifest and its auxiliary files say of the model, before any shard is read."""

    read: ReadManifest
    record: SourceRecord
    shape: ModelShape
    untied: tuple[tuple[str, ...], ...]  # what its config or class ties, and the manifest does not


def open_checkpoint(folder: Folder, options: OpenOptions) -> Checkpoint:
    """Open the manifest of a folder; see `open_packed`."""
    if options.drop:
        raise InputError(
            Parameter("drop"),
            "not supported for a manifest",
            "drop tensors when packing the original checkpoint",
            code="options.drop-from-manifest",
        )
    read = open_manifest(folder)
    if isinstance(read.folder, LocalFolder):
        read.folder.check_name()
    return open_packed(read)


def open_packed(read: ReadManifest) -> Checkpoint:
    """Read a manifest's headers and check that they cover the model exactly, including optimizer state if any.

    Tensors are in the order of the original source, whatever the stages are.
    """
    described = describe(read)
    bundles = Bundles(read.manifest, read.folder)
    bundles.read_ahead(read.manifest.stages, stored_kinds(read.manifest))
    return open_with_bundles(described, bundles)


def describe(read: ReadManifest) -> Described:
    """Read a manifest's config and source.json, and check that they are those of its stages."""
    manifest, folder = read.manifest, read.folder
    small = {auxiliary.path: auxiliary for auxiliary in manifest.files}
    for needed in (CONFIG_NAME, SOURCE_NAME):
        if needed not in small:
            raise ManifestError(f"{read}: files", f"{needed} is not listed", code="manifest.missing-file")
    config_file, record_file = folder.file(CONFIG_NAME), folder.file(SOURCE_NAME)
    config = read_config(config_file, small[CONFIG_NAME].digest)
    record = decode_record(read_whole(record_file, small[SOURCE_NAME].digest), str(record_file))
    description = manifest.model.description
    needs_files = is_sized_by_files(config, str(config_file), description)
    stored_names = record.stored(str(record_file)) if needs_files else None
    by_config = model_shape(config, str(config_file), stored_names, description)
    shape = as_packed(by_config, manifest)
    check_model(manifest, shape, str(read))
    _check_files(manifest.files, record, str(read))
    untied = tuple(group for group in by_config.ties if group not in shape.ties)
    return Described(read=read, record=record, shape=shape, untied=untied)


def open_with_bundles(described: Described, bundles: Bundles) -> Checkpoint:
    """Read the headers of a described manifest that its `bundles` have not read yet; see `open_packed`."""
    where, manifest, record = str(described.read), described.read.manifest, described.record
    if has_adapters(manifest):
        hint = (
            "resume it on any layout of the base: runner launch BASE -- --resume DIR; or merge the PEFT folder of "
            "runner launch --save into the base: reshard merge BASE ADAPTER"
        )
        raise ManifestError(
            where, "has adapters alone, of a base that it refers to", hint, code="manifest.adapters-alone"
        )
    originals = _open_originals(bundles, record, where)
    stored = _stored_tensors(bundles, WEIGHTS, where)
    shape = without_absent(described.shape, stored)
    _check_ties(manifest, stored, where, shape.tensors)
    tensors, record = _tensors_of_source(bundles, stored, record, shape)
    _check_strays(manifest, stored, tensors)
    check_coverage(tensors, shape, where)
    optimizer = manifest.training.optimizer if manifest.training else None
    moments = (
        {kind.name: _moments(bundles, optimizer, kind, record, shape) for kind in kinds_of(optimizer)}
        if optimizer
        else {}
    )
    folder = described.read.folder
    return Checkpoint(
        shape=shape,
        tensors=tensors,
        auxiliary=tuple(_auxiliary_at(folder, listed) for listed in manifest.files if listed.path != SOURCE_NAME),
        record=record,
        source=manifest.source,
        parents=(*manifest.parents, described.read.parent),
        manifest=manifest,
        originals=originals,
        moments=moments,
        trained=manifest.training,
        description=manifest.model.description,
        untied=described.untied,
    )


def adapters_in(read: ReadManifest) -> dict[Holds, list[TensorAt]]:
    """Return the tensors of a checkpoint of adapters, and of their optimizer state, by kind."""
    bundles, kinds = Bundles(read.manifest, read.folder), stored_kinds(read.manifest)
    bundles.read_ahead(read.manifest.stages, kinds)
    stages = read.manifest.stages
    return {kind: [tensor for stage in stages for tensor in _whole_tensors(bundles, stage, kind)] for kind in kinds}


def _auxiliary_at(folder: Folder, listed: AuxiliaryFile) -> AuxiliaryAt:
    """Return where an auxiliary file is.

    A model card is read without the section that `reshard push` adds. `.gitattributes`, which older versions list in
    the root, is taken as a file of the source, as newer ones pack it.
    """
    file = folder.file(listed.path)
    if listed.path == MODEL_CARD_NAME and has_section(data := read_whole(file)):
        file = MemoryFile(str(file), without_section(data))
    path = f"{SOURCE_FILES}{listed.path}" if listed.path == GIT_ATTRIBUTES_NAME else listed.path
    return AuxiliaryAt(path=path, file=file, digest=listed.compared_digest)


def _moments(
    bundles: Bundles, optimizer: OptimizerState, kind: StateKind, record: SourceRecord, shape: ModelShape
) -> dict[str, TensorAt]:
    """Return one kind of optimizer state, after checking that it covers the trained parameters that have it."""
    where = f"{bundles.root}: {kind.name}"
    trained = _not_frozen(bundles, trained_part(shape))
    trained = replace(trained, tensors=state_shapes(kind, optimizer.groups, trained.tensors, shape.ties))
    stored = _stored_tensors(bundles, kind.name, where)
    _check_ties(bundles.manifest, stored, where, trained.tensors)
    tensors, _ = _tensors_of_source(bundles, stored, record, trained)
    _check_strays(bundles.manifest, stored, tensors)
    check_coverage(tensors, trained, where)
    return tensors


def _not_frozen(bundles: Bundles, shape: ModelShape) -> ModelShape:
    """Leave out the parameters that the run froze, if it froze some: they have no optimizer state."""
    if (recorded := file_digest(bundles.manifest, TRAINED_NAME)) is None:
        return shape
    file = bundles.root.file(TRAINED_NAME)
    fqns = decode_trained(read_whole(file, recorded), str(file))
    return replace(shape, tensors={fqn: dims for fqn, dims in shape.tensors.items() if fqn in fqns})


def _check_files(files: Iterable[AuxiliaryFile], record: SourceRecord, where: str) -> None:
    """Raise if an auxiliary file has the name of a shard or of the index, which an export writes."""
    taken = {INDEX_NAME, *(shard.name for shard in record.shards)}
    for position, auxiliary in enumerate(files):
        if auxiliary.path in taken:
            raise ManifestError(
                f"{where}: files[{position}].path",
                f"{auxiliary.path!r} is a weight file of the source",
                code="manifest.source-mismatch",
            )


def _open_originals(bundles: Bundles, record: SourceRecord, where: str) -> OriginalFiles | None:
    """Return the files that virtual bundles reference, each of which must be a weight file of the source."""
    virtual = bundles.manifest.virtual
    if virtual is None:
        return None
    recorded = {shard.name: shard for shard in record.shards}
    for position, pinned in enumerate(virtual.files):
        if pinned.path not in recorded or recorded[pinned.path].digest != pinned.digest:
            problem = f"{SOURCE_NAME} has no {pinned.path!r} with the header {pinned.digest}"
            raise ManifestError(f"{where}: virtual.files[{position}]", problem, code="manifest.source-mismatch")
    files = {pinned.path: bundles.original_file(number) for number, pinned in enumerate(virtual.files)}
    return OriginalFiles(location=virtual.location, revision=virtual.revision, files=files)


def _stored_tensors(bundles: Bundles, holds: Holds, where: str) -> dict[str, TensorAt]:
    """Return every stored tensor of one kind, after checking that each is on the stage of its module."""
    tensors: dict[str, TensorAt] = {}
    for stage in bundles.manifest.stages:
        modules, num_before, nbytes = frozenset(stage.modules), len(tensors), 0
        for tensor in _whole_tensors(bundles, stage, holds):
            if tensor.name in tensors:
                join_slices(bundles.tensors_on(stage, holds))  # raises if this stage has it twice
                raise ShardError(tensor.place, "is in two shards", code="shard.tensor-twice")
            if module_of(tensor.name, modules) is None:
                problem = f"belongs to no module of stage {stage.index}"
                raise ShardError(tensor.place, problem, code="shard.wrong-stage")
            tensors[tensor.name] = tensor
            nbytes += tensor.nbytes
        if holds == WEIGHTS:
            counted = (len(tensors) - num_before, nbytes) if stage.shards else _count_spans(bundles.tensors_on(stage))
            _check_counts(stage, *counted, f"{where}: stages[{stage.index}]")
    return tensors


def _whole_tensors(bundles: Bundles, stage: Stage, holds: Holds) -> Iterator[TensorAt]:
    """Yield the tensors of a stage, merged slices last."""
    tensors = bundles.tensors_on(stage, holds)
    yield from (tensor for tensor in tensors if tensor.part is None)
    yield from map(merge_slices, join_slices(tensor for tensor in tensors if tensor.part is not None).values())


def _count_spans(tensors: Iterable[TensorAt]) -> tuple[int, int]:
    """Return the number of tensors in original files, and their bytes: two tied names may share them."""
    sizes = {(tensor.file, tensor.begin): tensor.nbytes for tensor in tensors}
    return len(sizes), sum(sizes.values())


def _check_counts(stage: Stage, num_tensors: int, nbytes: int, where: str) -> None:
    for name, expected, actual in (
        ("num_tensors", num_tensors, stage.num_tensors),
        ("nbytes", nbytes, stage.nbytes),
    ):
        if actual != expected:
            raise ManifestError(
                f"{where}.{name}", f"expected {expected} (its shards), found {actual}", code="manifest.wrong-count"
            )


def _check_ties(manifest: Manifest, stored: Mapping[str, TensorAt], where: str, expected: Collection[str]) -> None:
    """Raise if a tie's owner, or a replica on another stage, is expected and not stored, or if copies differ."""
    for position, group in enumerate(manifest.ties):
        if group.owner.fqn not in expected:
            continue
        place = f"{where}: ties[{position}]"
        for member in group.members:
            if member.fqn not in stored and (member == group.owner or member.stage != group.owner.stage):
                raise ShardError(
                    place, f"no shard of stage {member.stage} has {member.fqn!r}", code="shard.missing-tensor"
                )
        copies = [(member, stored[member.fqn]) for member in group.members if member.fqn in stored]
        digests = _digests_of([copy for _, copy in copies])
        if len({copy.dtype for _, copy in copies}) > 1 or len({*digests} - {None}) > 1:
            shown = ", ".join(
                f"{member.fqn} on stage {member.stage} {copy.dtype} {digest}"
                for (member, copy), digest in zip(copies, digests, strict=True)
            )
            raise ShardError(place, f"expected equal copies, found {shown}", code="shard.tied-copies-differ")


def _digests_of(copies: Sequence[TensorAt]) -> Sequence[str | None]:
    """Return digests to compare copies of a tensor by; copies that are sliced differently are read and hashed.

    Tensors in original files have no digests.
    """
    sliced = [slices_of(copy) for copy in copies]
    if all(len(slices) == 1 for slices in sliced):
        return [copy.digest for copy in copies]
    if len({tuple(part.part for part in slices) for slices in sliced}) > 1:
        return hash_tensors(copies)
    return [" ".join(part.digest or "" for part in slices) for slices in sliced]


def _tensors_of_source(
    bundles: Bundles, stored: Mapping[str, TensorAt], record: SourceRecord, shape: ModelShape
) -> tuple[dict[str, TensorAt], SourceRecord]:
    """Return the tensors that the source stored, in its order, and the record without those that training dropped.

    Training stores one copy of a tied weight per rank, and no tensor that the model recomputes.
    """
    owners = {replica.fqn: group.owner.fqn for group in bundles.manifest.ties for replica in group.replicas}
    tensors, gone = dict[str, TensorAt](), []
    for recorded in _names_in_order(record):
        name = shape.fqn_of(recorded)
        at = name if name in stored else owners.get(name, name)
        if at in stored:
            tensors[name] = replace(stored[at], name=name)
        elif bundles.manifest.training and name not in shape.tensors:
            gone.append(recorded)
    return tensors, replace(record, dropped=(*record.dropped, *gone))


def _names_in_order(record: SourceRecord) -> Iterator[str]:
    dropped = set(record.dropped)
    for shard in record.shards:
        yield from (entry.name for entry in in_data_order(shard.header.tensors) if entry.name not in dropped)


def _check_strays(manifest: Manifest, stored: Mapping[str, TensorAt], tensors: Mapping[str, TensorAt]) -> None:
    replicas = {replica.fqn for group in manifest.ties for replica in group.replicas}
    for name, tensor in stored.items():
        if name not in tensors and name not in replicas:
            raise ShardError(tensor.place, f"unknown tensor, not in {SOURCE_NAME}", code="shard.unknown-tensor")
