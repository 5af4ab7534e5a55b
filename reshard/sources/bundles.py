"""A manifest as a source: the tensors of its bundles, each FQN once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from manifests.errors import ManifestError, ShardError
from manifests.index import INDEX_NAME
from manifests.invariants import SOURCE_NAME, check_model
from manifests.models import ModelShape, is_sized_by_files, model_shape, module_of
from manifests.safetensors import in_data_order
from manifests.schema import MODEL_CARD_NAME, MOMENTS, WEIGHTS, AuxiliaryFile, Holds, Manifest, Parent, Stage
from reshard.copy.engine import hash_tensors
from reshard.sources.huggingface import CONFIG_NAME, check_coverage, without_absent
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint, OriginalFiles, TensorAt
from reshard.tensors.lazy import MemoryFile
from reshard.tensors.model_card import has_section, without_section
from reshard.tensors.slices import merge_slices, slices_of
from reshard.tensors.source_index import SourceRecord, decode_record
from stores.base import Folder, read_config, read_whole
from stores.bundles import Bundles, join_slices
from stores.manifest_file import Address, ManifestFile, find_manifest_file

__all__ = ["open_manifest"]


def open_manifest(address: Address | ManifestFile, bundles: Bundles | None = None) -> Checkpoint:
    """Read a manifest's headers and check that they cover the model exactly, including optimizer state if any.

    Tensors are in the order of the original source, whatever the stages are. Headers that `bundles` of this
    manifest have already read are not read again.

    Raises:
        ManifestError: the manifest is invalid, or does not match its auxiliary files or shards.
        ModelError: config.json is invalid or unsupported.
        ShardError: a header is invalid, a tensor is unknown or on the wrong stage, or copies of a tied weight differ.
        SourceError: a tensor is missing.
    """
    file = address if isinstance(address, ManifestFile) else find_manifest_file(address)
    manifest, digest = file.read()
    folder = file.folder
    small = {auxiliary.path: auxiliary for auxiliary in manifest.files}
    for needed in (CONFIG_NAME, SOURCE_NAME):
        if needed not in small:
            raise ManifestError(f"{file}: files", f"{needed} is not listed", code="manifest.missing-file")
    config_file, record_file = folder.file(CONFIG_NAME), folder.file(SOURCE_NAME)
    config = read_config(config_file, small[CONFIG_NAME].digest)
    record = decode_record(read_whole(record_file, small[SOURCE_NAME].digest), str(record_file))
    description = manifest.model.description
    needs_files = is_sized_by_files(config, str(config_file), description)
    stored_names = record.stored(str(record_file)) if needs_files else None
    shape = model_shape(config, str(config_file), stored_names, description)
    check_model(manifest, shape, str(file))
    _check_files(manifest.files, record, str(file))
    if bundles is None:
        bundles = Bundles(manifest, folder)
        bundles.read_ahead(manifest.stages, (WEIGHTS, *MOMENTS))
    originals = _open_originals(bundles, record, str(file))
    stored = _stored_tensors(bundles, WEIGHTS, str(file))
    shape = without_absent(shape, stored)
    _check_ties(manifest, stored, str(file))
    tensors, record = _tensors_of_source(manifest, stored, record, shape)
    _check_strays(manifest, stored, tensors, str(file))
    check_coverage(tensors, shape, str(file))
    moments = {}
    if manifest.training and manifest.training.optimizer:
        moments = {holds: _moments(bundles, holds, record, shape) for holds in MOMENTS}
    return Checkpoint(
        shape=shape,
        tensors=tensors,
        auxiliary=tuple(_auxiliary_at(folder, listed) for listed in manifest.files if listed.path != SOURCE_NAME),
        record=record,
        source=manifest.source,
        parents=(*manifest.parents, Parent(location=folder.location, digest=digest)),
        manifest=manifest,
        originals=originals,
        moments=moments,
        description=description,
    )


def _auxiliary_at(folder: Folder, listed: AuxiliaryFile) -> AuxiliaryAt:
    """Return where an auxiliary file is; a model card without the section that `reshard push` has added."""
    file = folder.file(listed.path)
    if listed.path == MODEL_CARD_NAME and has_section(data := read_whole(file)):
        file = MemoryFile(str(file), without_section(data))
    return AuxiliaryAt(path=listed.path, file=file, digest=listed.compared_digest)


def _moments(bundles: Bundles, holds: Holds, record: SourceRecord, shape: ModelShape) -> dict[str, TensorAt]:
    """Return one kind of optimizer state, after checking that it covers the trained parameters."""
    where = f"{bundles.root}: {holds}"
    untrained = shape.untrained_suffixes or ("\0",)
    parameters = {fqn: dims for fqn, dims in shape.tensors.items() if not fqn.endswith(untrained)}
    trained = replace(shape, tensors=parameters, ignored_suffixes=())
    stored = _stored_tensors(bundles, holds, where)
    _check_ties(bundles.manifest, stored, where)
    tensors, _ = _tensors_of_source(bundles.manifest, stored, record, trained)
    _check_strays(bundles.manifest, stored, tensors, where)
    check_coverage(tensors, trained, where)
    return tensors


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
        modules, here = frozenset(stage.modules), bundles.tensors_on(stage, holds)
        for name, parts in join_slices(here).items():
            if module_of(name, modules) is None:
                raise ShardError(
                    f"{parts[0].file}: {name!r}",
                    f"belongs to no module of stage {stage.index}",
                    code="shard.wrong-stage",
                )
            if name in tensors:
                raise ShardError(f"{parts[0].file}: {name!r}", "is in two shards", code="shard.tensor-twice")
            tensors[name] = merge_slices(parts)
        if holds == WEIGHTS:
            _check_counts(stage, here, f"{where}: stages[{stage.index}]")
    return tensors


def _check_counts(stage: Stage, tensors: list[TensorAt], where: str) -> None:
    # Two tied names may share bytes of an original file, and one tensor may have several slices.
    sizes = {(tensor.file, tensor.begin, tensor.name if stage.shards else ""): tensor.nbytes for tensor in tensors}
    num_tensors = len({tensor.name for tensor in tensors}) if stage.shards else len(sizes)
    for name, expected, found in (
        ("num_tensors", num_tensors, stage.num_tensors),
        ("nbytes", sum(sizes.values()), stage.nbytes),
    ):
        if found != expected:
            raise ManifestError(
                f"{where}.{name}", f"expected {expected} (its shards), found {found}", code="manifest.wrong-count"
            )


def _check_ties(manifest: Manifest, stored: Mapping[str, TensorAt], where: str) -> None:
    """Raise if a tie's owner, or a replica on another stage, is not stored, or if copies differ."""
    for position, group in enumerate(manifest.ties):
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
    manifest: Manifest, stored: Mapping[str, TensorAt], record: SourceRecord, shape: ModelShape
) -> tuple[dict[str, TensorAt], SourceRecord]:
    """Return the tensors that the source stored, in its order, and the record without those that training dropped.

    Training stores one copy of a tied weight per rank, and no tensor that the model recomputes.
    """
    owners = {replica.fqn: group.owner.fqn for group in manifest.ties for replica in group.replicas}
    tensors, gone = {}, []
    for recorded in _names_in_order(record):
        name = shape.fqn_of(recorded)
        at = stored.get(name) or stored.get(owners.get(name, name))
        if at is not None:
            tensors[name] = at if at.name == name else replace(at, name=name)
        elif manifest.training and name not in shape.tensors:
            gone.append(recorded)
    return tensors, replace(record, dropped=(*record.dropped, *gone))


def _names_in_order(record: SourceRecord) -> Iterable[str]:
    dropped = set(record.dropped)
    for shard in record.shards:
        for entry in in_data_order(shard.header.tensors):
            if entry.name not in dropped:
                yield entry.name


def _check_strays(
    manifest: Manifest, stored: Mapping[str, TensorAt], tensors: Mapping[str, TensorAt], where: str
) -> None:
    replicas = {replica.fqn for group in manifest.ties for replica in group.replicas}
    for name, tensor in stored.items():
        if name not in tensors and name not in replicas:
            raise ShardError(
                f"{tensor.file}: {name!r}",
                f"unknown tensor, not in {SOURCE_NAME}",
                code="shard.unknown-tensor",
            )
