"""pack: a checkpoint and a layout become bundles and a manifest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from manifests.digest import digest_bytes
from manifests.errors import InputError
from manifests.invariants import MANIFEST_NAME, SOURCE_NAME
from manifests.publish import publishing
from manifests.schema import CarriedFile, Layout, Manifest, Model, Shard, Stage
from manifests.store import write_file, write_manifest
from reshard.checkpoint import CarriedAt, Checkpoint
from reshard.engine import WriteOptions, WrittenShard, hash_tensors, write_shards
from reshard.journal import JOURNAL_NAME, Journal, plan_key
from reshard.plan import OutputShard, PackPlan, StagePlan, plan_pack
from reshard.record import encode_record
from reshard.virtual import References, refer_to_originals
from stores.base import read_whole

__all__ = ["PackOptions", "carry_files", "pack", "plan_pack"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions:
    """Where to write, and which `stages` to pack (None: all); the bundles of the others are virtual."""

    out: Path
    force: bool = False
    stages: frozenset[int] | None = None
    write: WriteOptions = field(default_factory=WriteOptions)


def pack(checkpoint: Checkpoint, plan: PackPlan, options: PackOptions) -> Manifest:
    """Write one bundle per stage and, last, the manifest that commits them.

    Raises:
        InputError: `out` exists, the disk is full, a source file changed or is damaged, two stored copies
            of a tied weight differ, or a bundle that is to be virtual has nothing to refer to.
    """
    _check_stored_ties(checkpoint)
    wanted = range(len(plan.stages)) if options.stages is None else options.stages
    references = refer_to_originals([stage for stage in plan.stages if stage.index not in wanted], checkpoint)
    shards = [shard for stage in plan.stages if stage.index in wanted for shard in stage.shards]
    key = plan_key(shards)
    with publishing(
        options.out,
        force=options.force,
        is_ours=_is_bundle_folder,
        is_resumable=lambda folder: Journal(folder, key).is_begun and not options.force,
    ) as folder:
        journal = Journal(folder, key)
        _keep_only(folder, {JOURNAL_NAME, *(shard.path for shard in shards)})
        _check_space(shards, options.out, folder)
        journal.begin()
        files = carry_files(checkpoint.carried, folder)
        record = encode_record(checkpoint.record)
        write_file(folder / SOURCE_NAME, record)
        files += (CarriedFile(path=SOURCE_NAME, nbytes=len(record), digest=digest_bytes(record)),)
        write = replace(options.write, journal=journal)
        written = {shard.path: shard for shard in write_shards(shards, folder, write)}
        journal.finish()
        manifest = _manifest(checkpoint, plan, _Outcome(written, references, files))
        write_manifest(folder, manifest)
    return manifest


def carry_files(carried: tuple[CarriedAt, ...], folder: Path) -> tuple[CarriedFile, ...]:
    """Copy small files below `folder`, byte for byte, checking the digests that are known."""
    files = []
    for item in carried:
        data = read_whole(item.file, item.digest)
        target = folder / item.path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, data)
        files.append(CarriedFile(path=item.path, nbytes=len(data), digest=digest_bytes(data)))
    return tuple(files)


def _keep_only(folder: Path, names: set[str]) -> None:
    """Clear away what an earlier run left behind but for these: half-written small files."""
    for path in folder.rglob("*"):
        if not path.is_dir() and path.relative_to(folder).as_posix() not in names:
            path.unlink()


def _check_space(shards: Sequence[OutputShard], out: Path, folder: Path) -> None:
    needed = sum(shard.nbytes for shard in shards)
    there = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + there
    if needed > free:
        raise InputError(str(out), f"{needed} bytes needed, {free} free", "choose another disk for --out")


def _check_stored_ties(checkpoint: Checkpoint) -> None:
    """Refuse a source that stores a tied weight twice with different bytes: one of them would be lost."""
    for group in checkpoint.shape.ties:
        stored = [checkpoint.tensors[fqn] for fqn in group if fqn in checkpoint.tensors]
        kinds = {tensor.dtype for tensor in stored}
        if len(stored) > 1 and (len(kinds) > 1 or len(set(hash_tensors(stored))) > 1):
            raise InputError(
                str(stored[0].file),
                f"the config ties {' and '.join(group)}, and the files store different values for them",
                f"set tie_word_embeddings to false to keep both, or say --drop {stored[-1].name}",
            )


def _is_bundle_folder(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What is on disk, and what is referred to instead."""

    written: Mapping[str, WrittenShard]
    references: References
    files: tuple[CarriedFile, ...]


def _manifest(checkpoint: Checkpoint, plan: PackPlan, done: _Outcome) -> Manifest:
    placement = plan.layout.placement
    return Manifest(
        created_by=f"reshard {version('reshard')}",
        model=Model(
            architecture=checkpoint.shape.architecture,
            num_layers=checkpoint.shape.num_layers,
            num_params=checkpoint.shape.num_params,
        ),
        source=checkpoint.source,
        layout=Layout(
            spec=plan.layout.spec,
            style=placement.style,
            num_stages=placement.num_stages,
            num_ranks=placement.num_ranks,
            num_virtual=placement.num_virtual,
            schedule=plan.layout.schedule,
        ),
        stages=tuple(_stage(stage, done) for stage in plan.stages),
        ties=plan.ties,
        files=done.files,
        parents=checkpoint.parents,
        training=checkpoint.manifest.training if checkpoint.manifest else None,
        virtual=done.references.virtual,
    )


def _stage(stage: StagePlan, done: _Outcome) -> Stage:
    spans = done.references.spans.get(stage.index, ())
    shards = () if spans else stage.shards
    return Stage(
        index=stage.index,
        rank=stage.rank,
        virtual=stage.virtual,
        modules=stage.modules,
        num_tensors=done.references.num_tensors[stage.index] if spans else stage.num_tensors,
        num_params=stage.num_params,
        nbytes=sum(span.end - span.begin for span in spans) if spans else stage.nbytes,
        shards=tuple(
            Shard(path=shard.path, nbytes=shard.nbytes, digest=done.written[shard.path].digest, holds=shard.holds)
            for shard in shards
        ),
        spans=spans,
    )
