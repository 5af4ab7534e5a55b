"""pack: a checkpoint and a layout become bundles and a manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from manifests.codec import encode_manifest
from manifests.digest import digest_bytes
from manifests.errors import InputError
from manifests.invariants import MANIFEST_NAME, SOURCE_NAME, check_manifest
from manifests.publish import partial_of, publishing
from manifests.schema import CarriedFile, Layout, Manifest, Model, Shard, Stage
from reshard.checkpoint import CarriedAt, Checkpoint
from reshard.engine import WriteOptions, WrittenShard, hash_tensors
from reshard.journal import JOURNAL_NAME, Journal, is_working_name, plan_key
from reshard.plan import OutputShard, PackPlan, StagePlan, plan_pack
from reshard.record import encode_record
from reshard.target import FolderTarget, Target, open_target
from reshard.virtual import References, refer_to_originals
from stores.address import is_url
from stores.base import read_whole
from stores.manifest_file import Address

__all__ = [
    "Outcome",
    "PackOptions",
    "carry_all",
    "carry_files",
    "check_stored_ties",
    "describe",
    "is_manifest_folder",
    "keep_only",
    "pack",
    "parts_of",
    "plan_pack",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions:
    """Where to write, and which `stages` to pack (None: all); the bundles of the others are virtual."""

    out: Address
    force: bool = False
    stages: frozenset[int] | None = None
    write: WriteOptions = field(default_factory=WriteOptions)


def pack(checkpoint: Checkpoint, plan: PackPlan, options: PackOptions) -> Manifest:
    """Write one bundle per stage and, last, the manifest that commits them.

    Raises:
        InputError: `out` exists, the disk is full, a source file changed or is damaged, two stored copies
            of a tied weight differ, or a bundle that is to be virtual has nothing to refer to.
    """
    check_stored_ties(checkpoint)
    wanted = range(len(plan.stages)) if options.stages is None else options.stages
    references = refer_to_originals([stage for stage in plan.stages if stage.index not in wanted], checkpoint)
    shards = [shard for stage in plan.stages if stage.index in wanted for shard in stage.shards]
    with _open_target(options, shards) as target:
        files = carry_all(checkpoint, target)
        done = target.write_shards(shards, options.write)
        written = {shard.path: made for shard, made in zip(shards, done, strict=True)}
        manifest = describe(checkpoint, plan, Outcome(written, references, files))
        check_manifest(manifest)
        # Commit point: readers ignore a place without manifest.json.
        target.commit(MANIFEST_NAME, encode_manifest(manifest))
    return manifest


def carry_all(checkpoint: Checkpoint, target: Target) -> tuple[CarriedFile, ...]:
    """Copy a checkpoint's small files, and write down what it was."""
    files = carry_files(checkpoint.carried, target)
    record = encode_record(checkpoint.record)
    target.put(SOURCE_NAME, record)
    return (*files, CarriedFile(path=SOURCE_NAME, nbytes=len(record), digest=digest_bytes(record)))


def carry_files(carried: tuple[CarriedAt, ...], target: Target) -> tuple[CarriedFile, ...]:
    """Copy small files, byte for byte, checking the digests that are known.

    Raises:
        InputError: one cannot be read, is not what its digest says, or has a name that is needed here.
    """
    files = []
    for item in carried:
        if is_working_name(item.path):  # a manifest's; those of a model were looked at before
            raise InputError(str(item.file), "this name belongs to files that are being written", "leave the file out")
        data = read_whole(item.file, item.digest)
        target.put(item.path, data)
        files.append(CarriedFile(path=item.path, nbytes=len(data), digest=digest_bytes(data)))
    return tuple(files)


@contextmanager
def _open_target(options: PackOptions, shards: Sequence[OutputShard]) -> Iterator[Target]:
    """Give the place to write to. A folder that an interrupted pack of the same plan left is gone on with."""
    if is_url(options.out):
        with open_target(options.out, force=options.force, is_ours=lambda names: MANIFEST_NAME in names) as target:
            yield target
        return
    out, key = Path(options.out), plan_key(shards)
    _check_no_parts(out)
    with publishing(
        out,
        force=options.force,
        is_ours=is_manifest_folder,
        is_resumable=lambda folder: Journal(folder, key).is_begun and not options.force,
    ) as folder:
        journal = Journal(folder, key)
        keep_only(folder, {JOURNAL_NAME, *(shard.path for shard in shards)})
        journal.begin()
        yield FolderTarget(folder, journal)


def is_manifest_folder(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


def parts_of(out: Path) -> Path:
    """Give the folder where the parts of a pack say what they did (see `reshard.parts`)."""
    return partial_of(out).with_suffix(".parts")


def _check_no_parts(out: Path) -> None:
    """Refuse to clear away the work of processes that each pack a part."""
    if parts_of(out).exists():
        hint = f"end them with reshard commit {out}, or remove {partial_of(out)} and {parts_of(out)}"
        raise InputError(str(out), "parts of a pack (--part) are waiting for the others", hint)


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Clear away what an earlier run left behind but for these: half-written small files."""
    for path in folder.rglob("*"):
        if not path.is_dir() and path.relative_to(folder).as_posix() not in names:
            path.unlink()


def check_stored_ties(checkpoint: Checkpoint) -> None:
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is there now, by the paths that were planned, and what is referred to instead."""

    written: Mapping[str, WrittenShard]
    references: References
    files: tuple[CarriedFile, ...]


def describe(checkpoint: Checkpoint, plan: PackPlan, done: Outcome) -> Manifest:
    """Give the manifest of what was written."""
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


def _stage(stage: StagePlan, done: Outcome) -> Stage:
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
            Shard(path=made.path, nbytes=made.nbytes, digest=made.digest, holds=shard.holds)
            for shard, made in ((shard, done.written[shard.path]) for shard in shards)
        ),
        spans=spans,
    )
