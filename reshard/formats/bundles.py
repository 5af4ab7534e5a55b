"""A manifest as a source: its bundles' tensors, each named once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from manifests.digest import digest_bytes
from manifests.errors import InputError
from manifests.invariants import SOURCE_NAME, check_model
from manifests.jsontext import parse_json_object
from manifests.models import ModelShape, model_shape, module_of
from manifests.schema import CarriedFile, Manifest, Parent, Stage
from manifests.store import find_manifest, open_shard, read_manifest, read_small_file
from reshard.checkpoint import CarriedAt, Checkpoint, TensorAt, tensors_in
from reshard.formats.huggingface import CONFIG_NAME, check_coverage, without_absent
from reshard.record import INDEX_NAME, SourceRecord, decode_record
from stores.local import LocalFile

__all__ = ["open_manifest"]


def open_manifest(path: Path) -> Checkpoint:
    """Read a manifest's headers and check that they cover the model exactly.

    The tensors stand in the order of the source they came from, whatever the stages are.

    Raises:
        InputError: the manifest, a header or a carried file is not what it must be, a tensor is
            missing, strays or is on the wrong stage, or two copies of a tied weight differ.
    """
    file = find_manifest(path)
    manifest = read_manifest(file)
    folder = file.parent
    small = {carried.path: carried for carried in manifest.files}
    for needed in (CONFIG_NAME, SOURCE_NAME):
        if needed not in small:
            raise InputError(f"{file}: files", f"{needed} is not among them")
    config_path = folder / CONFIG_NAME
    config = parse_json_object(read_small_file(config_path, small[CONFIG_NAME].digest), str(config_path))
    record_text = read_small_file(folder / SOURCE_NAME, small[SOURCE_NAME].digest)
    shape = model_shape(config, str(config_path))
    check_model(manifest, shape, str(file))
    record = decode_record(record_text, str(folder / SOURCE_NAME))
    _check_files(manifest.files, record, str(file))
    stored = _stored_tensors(manifest, file)
    shape = without_absent(shape, stored)
    _check_ties(manifest, stored, str(file))
    tensors, record = _tensors_of_source(manifest, stored, record, shape)
    _check_strays(manifest, stored, tensors, str(file))
    check_coverage(tensors, shape, str(file))
    return Checkpoint(
        shape=shape,
        tensors=tensors,
        carried=tuple(
            CarriedAt(path=carried.path, file=LocalFile(folder / carried.path), digest=carried.digest)
            for carried in manifest.files
            if carried.path != SOURCE_NAME
        ),
        record=record,
        source=manifest.source,
        parents=(
            *manifest.parents,
            Parent(location=str(folder.resolve()), digest=digest_bytes(read_small_file(file))),
        ),
        manifest=manifest,
    )


def _check_files(files: Iterable[CarriedFile], record: SourceRecord, where: str) -> None:
    """Refuse a carried file that an export would write over a shard or the index."""
    taken = {INDEX_NAME, *(shard.name for shard in record.shards)}
    for position, carried in enumerate(files):
        if carried.path in taken:
            raise InputError(f"{where}: files[{position}].path", f"{carried.path!r} is a weight file of the source")


def _stored_tensors(manifest: Manifest, file: Path) -> dict[str, TensorAt]:
    """Give every tensor of every shard; each lies on the stage that holds its module."""
    tensors: dict[str, TensorAt] = {}
    for stage in manifest.stages:
        modules, here = frozenset(stage.modules), []
        for shard in stage.shards:
            path = file.parent / shard.path
            header = open_shard(file.parent, shard)
            for tensor in tensors_in(LocalFile(path), header, header.digests(str(path))):
                if module_of(tensor.name, modules) is None:
                    raise InputError(f"{path}: {tensor.name!r}", f"belongs to no module of stage {stage.index}")
                if tensor.name in tensors:
                    raise InputError(f"{path}: {tensor.name!r}", "is in two shards")
                tensors[tensor.name] = tensor
                here.append(tensor)
        _check_counts(stage, here, f"{file}: stages[{stage.index}]")
    return tensors


def _check_counts(stage: Stage, tensors: list[TensorAt], where: str) -> None:
    for name, expected, found in (
        ("num_tensors", len(tensors), stage.num_tensors),
        ("nbytes", sum(tensor.nbytes for tensor in tensors), stage.nbytes),
    ):
        if found != expected:
            raise InputError(f"{where}.{name}", f"expected {expected} (its shards), found {found}")


def _check_ties(manifest: Manifest, stored: Mapping[str, TensorAt], where: str) -> None:
    """Refuse a tie whose owner, or whose replica on another stage, is not stored, and copies that differ."""
    for position, group in enumerate(manifest.ties):
        place = f"{where}: ties[{position}]"
        for member in group.members:
            if member.fqn not in stored and (member == group.owner or member.stage != group.owner.stage):
                raise InputError(place, f"no shard of stage {member.stage} holds {member.fqn!r}")
        copies = [(member, stored[member.fqn]) for member in group.members if member.fqn in stored]
        if len({(copy.dtype, copy.digest) for _, copy in copies}) > 1:
            shown = ", ".join(
                f"{member.fqn} on stage {member.stage} {copy.dtype} {copy.digest}" for member, copy in copies
            )
            raise InputError(place, f"expected equal copies, found {shown}")


def _tensors_of_source(
    manifest: Manifest, stored: Mapping[str, TensorAt], record: SourceRecord, shape: ModelShape
) -> tuple[dict[str, TensorAt], SourceRecord]:
    """Give the tensors that the source stored, in its order, and the record less what training left behind.

    Training keeps one copy of a tied weight per rank, and no tensor that the model recomputes.
    """
    owners = {replica.fqn: group.owner.fqn for group in manifest.ties for replica in group.replicas}
    tensors, gone = {}, []
    for name in _names_in_order(record):
        at = stored.get(name) or stored.get(owners.get(name, name))
        if at is not None:
            tensors[name] = replace(at, name=name)
        elif manifest.training and name not in shape.tensors:
            gone.append(name)
    return tensors, replace(record, dropped=(*record.dropped, *gone))


def _names_in_order(record: SourceRecord) -> Iterable[str]:
    dropped = set(record.dropped)
    for shard in record.shards:
        for entry in sorted(shard.header.tensors, key=lambda entry: (entry.begin, entry.end)):
            if entry.name not in dropped:
                yield entry.name


def _check_strays(
    manifest: Manifest, stored: Mapping[str, TensorAt], tensors: Mapping[str, TensorAt], where: str
) -> None:
    replicas = {replica.fqn for group in manifest.ties for replica in group.replicas}
    for name, tensor in stored.items():
        if name not in tensors and name not in replicas:
            raise InputError(f"{tensor.file}: {name!r}", f"the source had no such tensor ({SOURCE_NAME})")
