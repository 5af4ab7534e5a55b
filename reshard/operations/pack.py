"""pack: a checkpoint and a layout become bundles and a manifest."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

from manifests.codec import encode_manifest
from manifests.errors import OutputError, SourceError
from manifests.invariants import MANIFEST_NAME, SOURCE_NAME, check_manifest
from manifests.publish import partial_of
from manifests.schema import AuxiliaryFile, Layout, Manifest, Model, Shard, Stage
from reshard.copy.destination import FolderTarget, Target
from reshard.copy.engine import WriteOptions, WrittenShard, hash_tensors
from reshard.copy.journal import is_working_name
from reshard.copy.resumable import open_target
from reshard.copy.unchanged import check_unchanged
from reshard.operations.hub_check import HubReport, check_hub_files
from reshard.plans.pack_plan import OutputShard, PackPlan, StagePlan, plan_pack
from reshard.plans.references import References, refer_to_originals
from reshard.tensors.checkpoint import CarriedAt, Checkpoint
from reshard.tensors.lazy import MadeFile
from reshard.tensors.source_index import record_blocks
from stores.manifest_file import Address

PLAN_NAME = "plan.json"  # of parts, in the folder of their records

__all__ = [
    "PLAN_NAME",
    "Outcome",
    "PackOptions",
    "carry_all",
    "carry_files",
    "check_stored_ties",
    "describe",
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
    verify_source: bool = False  # read what the pack does not, to compare whole files of a hub
    report: Callable[[HubReport], object] = lambda report: None  # is told before the commit


def pack(checkpoint: Checkpoint, plan: PackPlan, options: PackOptions) -> Manifest:
    """Write one bundle per stage and, last, the manifest that commits them.

    Raises:
        InputError: `out` exists, the disk is full, a source file changed or is damaged, two stored copies
            of a tied weight differ, a bundle that is to be virtual has nothing to refer to, or a file is not
            what the hub lists.
    """
    check_stored_ties(checkpoint)
    wanted = range(len(plan.stages)) if options.stages is None else options.stages
    references = refer_to_originals([stage for stage in plan.stages if stage.index not in wanted], checkpoint)
    shards = [shard for stage in plan.stages if stage.index in wanted for shard in stage.shards]
    names = {MANIFEST_NAME, SOURCE_NAME, *(item.path for item in checkpoint.carried), *(each.path for each in shards)}
    with _open_target(options, shards, names) as target:
        files = carry_all(checkpoint, target)
        done = target.write_shards(shards, options.write)
        written = {shard.path: made for shard, made in zip(shards, done, strict=True)}
        manifest = describe(checkpoint, plan, Outcome(written, references, files))
        check_manifest(manifest)
        folder = target.folder if isinstance(target, FolderTarget) else None
        options.report(check_hub_files(checkpoint, shards, folder, fetch=options.verify_source))
        check_unchanged(plan.shards_on(), checkpoint.carried)
        # Commit point: readers ignore a place without manifest.json.
        target.commit(MANIFEST_NAME, encode_manifest(manifest))
    return manifest


def carry_all(checkpoint: Checkpoint, target: Target) -> tuple[AuxiliaryFile, ...]:
    """Copy a checkpoint's small files, and write down what it was."""
    files = carry_files(checkpoint.carried, target)
    record = partial(record_blocks, checkpoint.record)
    return (*files, target.copy(SOURCE_NAME, MadeFile(SOURCE_NAME, sum(map(len, record())), record)))


def carry_files(carried: tuple[CarriedAt, ...], target: Target) -> tuple[AuxiliaryFile, ...]:
    """Copy the files beside the weights, byte for byte, checking the digests that are known.

    Raises:
        InputError: one cannot be read, is not what its digest says, or has a name that is needed here.
    """
    files = []
    for item in carried:
        if is_working_name(item.path):  # a manifest's; those of a model were looked at before
            raise SourceError(
                str(item.file),
                "this name belongs to files that are being written",
                "leave the file out",
                code="source.reserved-name",
            )
        files.append(target.copy(item.path, item.file, item.digest))
    return tuple(files)


@contextmanager
def _open_target(options: PackOptions, shards: Sequence[OutputShard], names: Collection[str]) -> Iterator[Target]:
    """Yield the place to write to; an interrupted pack of the same plan is resumed."""
    with open_target(
        options.out,
        shards,
        force=options.force,
        wanted=names,
        check_free=_check_no_parts,
    ) as target:
        yield target


def parts_of(out: Path) -> Path:
    """Give the folder where the parts of a pack say what they did (see `reshard.operations.pack_distributed`)."""
    return partial_of(out).with_suffix(".parts")


def _check_no_parts(out: Path) -> None:
    """Refuse to remove the work of processes that each pack a part. A record without a plan is of none."""
    if (parts_of(out) / PLAN_NAME).exists():
        hint = f"end them with reshard commit {out}, or remove {partial_of(out)} and {parts_of(out)}"
        problem = "parts of a pack (--part) are waiting for the others"
        raise OutputError(str(out), problem, hint, code="output.parts-waiting")
    shutil.rmtree(parts_of(out), ignore_errors=True)


def check_stored_ties(checkpoint: Checkpoint) -> None:
    """Refuse a source that stores a tied weight twice with different bytes: one of them would be lost."""
    for group in checkpoint.shape.ties:
        stored = [checkpoint.tensors[fqn] for fqn in group if fqn in checkpoint.tensors]
        kinds = {tensor.dtype for tensor in stored}
        if len(stored) > 1 and (len(kinds) > 1 or len(set(hash_tensors(stored))) > 1):
            raise SourceError(
                str(stored[0].file),
                f"the config ties {' and '.join(group)}, and the files store different values for them",
                f"set tie_word_embeddings to false to keep both, or say --drop {stored[-1].name}",
                code="source.tied-values-differ",
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is there now, by the paths that were planned, and what is referred to instead."""

    written: Mapping[str, WrittenShard]
    references: References
    files: tuple[AuxiliaryFile, ...]


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
