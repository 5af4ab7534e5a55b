"""pack: from a checkpoint and a layout to bundles and a manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from manifests import __version__
from manifests.codec import encode_manifest
from manifests.errors import Parameter, SourceError
from manifests.index import INDEX_NAME, index_blocks
from manifests.invariants import MANIFEST_NAME, SOURCE_NAME, check_manifest
from manifests.schema import AuxiliaryFile, Layout, Manifest, Model, Shard, Stage
from reshard.copy.destination import FolderTarget, Target, check_unchanged, copy_files, open_target
from reshard.copy.engine import WrittenShard, hash_tensors
from reshard.packing.hub_sha256 import HubCheck
from reshard.packing.options import PackOptions, PackResult
from reshard.plans.pack_plan import OutputShard, PackPlan, StagePlan
from reshard.plans.references import References, refer_to_others
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.checksums import verify_records
from reshard.tensors.lazy import MadeFile
from reshard.tensors.source_index import record_blocks


def write_bundles(
    checkpoint: Checkpoint, plan: PackPlan, options: PackOptions, stages: Collection[int] | None = None
) -> PackResult:
    """Write the bundles of these stages (None: of all) and, last, the manifest that commits them.

    Raises:
        OutputError: `out` exists or cannot be written, or the disk is full.
        SourceError: a source file changed, stored copies of a tied weight differ, or a file is not what the hub lists.
        ShardError: a source file is damaged.
        InputError: a bundle that would be virtual has no original file to refer to.
    """
    check_stored_ties(checkpoint)
    shards, references = plan.shards_on(stages), refer_to_others(checkpoint, plan, stages)
    names = {MANIFEST_NAME, SOURCE_NAME, *(item.path for item in checkpoint.auxiliary)}
    names |= {shard.path for shard in shards}
    names |= {INDEX_NAME} if any(shard.is_indexed for shard in shards) else set()
    with ExitStack() as stack:
        target = stack.enter_context(open_target(options.out, shards, force=options.force, wanted=names))
        files = copy_auxiliary_files(checkpoint, target)
        if INDEX_NAME in names:
            target.copy(INDEX_NAME, _index_of(shards, target))
        folder = target.folder if isinstance(target, FolderTarget) else None
        hub = stack.enter_context(HubCheck(checkpoint, shards, folder, fetch=options.verify_source))
        done = target.write_shards(shards, replace(options.write, written=hub.written))
        written = {shard.path: on_disk for shard, on_disk in zip(shards, done, strict=True)}
        manifest = build_manifest(checkpoint, plan, Written(written, references, files))
        check_manifest(manifest)
        report = hub.finish()
        verify_records(origin for shard in shards for origin in shard.origins)
        check_unchanged(plan.shards_on(), checkpoint.auxiliary)
        # Commit point: readers ignore an output without manifest.json.
        target.commit(MANIFEST_NAME, encode_manifest(manifest))
    return PackResult(committed=manifest, out=options.out, hub=report, used=options.write.parallelism.used)


def copy_auxiliary_files(checkpoint: Checkpoint, target: Target) -> tuple[AuxiliaryFile, ...]:
    """Copy a checkpoint's auxiliary files, and write source.json."""
    files = copy_files(checkpoint.auxiliary, target)
    record = partial(record_blocks, checkpoint.record)
    return (*files, target.copy(SOURCE_NAME, MadeFile(SOURCE_NAME, sum(map(len, record())), record)))


def index_file(weights: Mapping[str, Iterable[str]], total_nbytes: int) -> MadeFile:
    """Return the index of these shards as a file to copy; see `index_blocks`."""
    blocks = partial(index_blocks, weights, total_nbytes)
    return MadeFile(INDEX_NAME, sum(map(len, blocks())), blocks)


def _index_of(shards: Sequence[OutputShard], target: Target) -> MadeFile:
    indexed = {target.place(shard.path): shard for shard in shards if shard.is_indexed}
    weights = {path: [origin.name for origin in shard.origins] for path, shard in indexed.items()}
    return index_file(weights, sum(origin.nbytes for shard in indexed.values() for origin in shard.origins))


def check_stored_ties(checkpoint: Checkpoint) -> None:
    """Refuse a source that stores a tied weight twice with different bytes: one of them would be lost."""
    for group in checkpoint.shape.ties:
        stored = [checkpoint.tensors[fqn] for fqn in group if fqn in checkpoint.tensors]
        kinds = {tensor.dtype for tensor in stored}
        if len(stored) > 1 and (len(kinds) > 1 or len(set(hash_tensors(stored))) > 1):
            raise SourceError(
                str(stored[0].file),
                f"the config ties {' and '.join(group)}, but the files store different values for them",
                f"set tie_word_embeddings to false to keep both, or pass {Parameter('drop', [stored[-1].name])}",
                code="source.tied-values-differ",
            )


@dataclass(frozen=True, slots=True)
class Written:
    """The shards that were written, by their planned paths, what virtual bundles refer to, and the auxiliary files."""

    written: Mapping[str, WrittenShard]
    references: References
    files: tuple[AuxiliaryFile, ...]


def build_manifest(checkpoint: Checkpoint, plan: PackPlan, done: Written) -> Manifest:
    placement = plan.layout.placement
    return Manifest(
        created_by=f"reshard {__version__}",
        model=Model(
            architecture=checkpoint.shape.architecture,
            num_layers=checkpoint.shape.num_layers,
            num_params=checkpoint.shape.num_params,
            description=checkpoint.description,
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
        training=checkpoint.trained,
        virtual=done.references.virtual,
    )


def _stage(stage: StagePlan, done: Written) -> Stage:
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
            Shard(path=on_disk.path, nbytes=on_disk.nbytes, digest=on_disk.digest, holds=shard.holds)
            for shard, on_disk in ((shard, done.written[shard.path]) for shard in shards)
        ),
        spans=spans,
    )
