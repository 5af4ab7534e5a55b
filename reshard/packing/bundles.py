"""pack: from a checkpoint and a layout to bundles and a manifest.

The bundles of stages that are not packed are virtual: they refer to tensors in the source's own files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from manifests import __version__
from manifests.codec import encode_manifest
from manifests.errors import InputError, Parameter, UsageError
from manifests.index import INDEX_NAME, encode_index
from manifests.invariants import MANIFEST_NAME, SOURCE_NAME, check_manifest
from manifests.schema import AuxiliaryFile, Layout, Manifest, Model, OriginalFile, Shard, Span, Stage, Virtual
from reshard.copy.destination import FolderTarget, Target, check_unchanged, copy_files, open_target
from reshard.copy.engine import WrittenShard
from reshard.formatting import parse_numbers
from reshard.packing.hub_sha256 import HubCheck
from reshard.packing.options import PackOptions, PackResult
from reshard.plans.pack_plan import OutputShard, PackPlan, StagePlan
from reshard.tensors.checkpoint import Checkpoint, OriginalFiles
from reshard.tensors.checksums import verify_records
from reshard.tensors.lazy import MemoryFile
from reshard.tensors.source_index import SUFFIX, encode_record
from reshard.transforms.casts import check_stored_ties
from stores.base import Range, merge_ranges


def write_bundles(
    checkpoint: Checkpoint, plan: PackPlan, options: PackOptions, stages: Collection[int] | None = None
) -> PackResult:
    """Write the bundles of these stages (None: of all) and, last, the manifest that commits them."""
    check_stored_ties(checkpoint)
    shards, references = plan.shards_on(stages), refer_to_others(checkpoint, plan, stages)
    names = {MANIFEST_NAME, SOURCE_NAME, *(item.path for item in checkpoint.auxiliary)}
    names |= {shard.path for shard in shards}
    names |= {INDEX_NAME} if any(shard.is_indexed for shard in shards) else set()
    with ExitStack() as stack:
        target = stack.enter_context(open_target(options.out, shards, force=options.force, wanted=names))
        files = copy_auxiliary_files(checkpoint, target)
        if INDEX_NAME in names:
            target.copy(INDEX_NAME, _index_of(shards))
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
    return (*files, target.copy(SOURCE_NAME, MemoryFile(SOURCE_NAME, encode_record(checkpoint.record))))


def _index_of(shards: Sequence[OutputShard]) -> MemoryFile:
    indexed = [shard for shard in shards if shard.is_indexed]
    weights = {shard.path: [origin.name for origin in shard.origins] for shard in indexed}
    total = sum(origin.nbytes for shard in indexed for origin in shard.origins)
    return MemoryFile(INDEX_NAME, encode_index(weights, total))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class References:
    """The virtual bundles of a manifest: the files, and by stage the spans and the number of tensors."""

    virtual: Virtual | None
    spans: Mapping[int, tuple[Span, ...]]
    num_tensors: Mapping[int, int]


def choose_stages(plan: PackPlan, virtual: bool, wanted: str | None) -> frozenset[int] | None:
    """Return the stages to pack, `wanted` being written as `0-3,7`. None: all of them."""
    if virtual and wanted is not None:
        problem = f"conflicts with {Parameter('virtual', True)}, which packs no stage"
        raise UsageError(Parameter("stages"), problem, "leave one of the two out", code="options.conflict")
    if virtual or wanted is None:
        return frozenset() if virtual else None
    chosen = parse_numbers(wanted) if isinstance(wanted, str) else None
    if chosen is None:
        problem = f"expected numbers, found {str(wanted)[:80]!r}"
        raise UsageError(Parameter("stages"), problem, "write 0-3, or 0,2,5-7", code="options.bad-stages")
    if max(chosen) >= len(plan.stages):
        raise UsageError(
            Parameter("stages"),
            f"expected stages from 0 to {len(plan.stages) - 1}, found {max(chosen)}",
            "stages are numbered from 0",
            code="options.unknown-stage",
        )
    return chosen


def refer_to_others(checkpoint: Checkpoint, plan: PackPlan, packed: Collection[int] | None) -> References:
    """Return the tensors of all stages but the `packed` ones (None: all are) as spans of the files that they are in."""
    stages = [] if packed is None else [stage for stage in plan.stages if stage.index not in packed]
    if stages:
        _check_names(checkpoint)
    originals = checkpoint.originals or OriginalFiles(location="", revision=None, files={})
    names = {file: name for name, file in originals.files.items() if name.endswith(SUFFIX)}
    tied = {fqn for group in checkpoint.shape.ties for fqn in group}
    ranges: dict[int, dict[str, list[Range]]] = {}
    num_tensors: dict[int, int] = {}
    for stage in stages:
        here: dict[str, list[Range]] = {}
        seen: set[tuple[str, int]] = set()  # tied tensors, which may be the same bytes
        count = 0
        for tensor in (origin for shard in stage.shards for origin in shard.origins):
            name = names.get(tensor.file)
            if name is None:
                problem = "is not a weight file of a Hugging Face folder, which virtual bundles require"
                raise _not_virtual(str(tensor.file), problem, "pack")
            if not tensor.nbytes:
                raise _not_virtual(tensor.place, "is empty, and virtual bundles can only refer to bytes", "pack")
            if tensor.name in tied:
                if (name, tensor.begin) in seen:
                    continue
                seen.add((name, tensor.begin))
            count += 1
            here.setdefault(name, []).append((tensor.begin, tensor.end))
        if here:
            ranges[stage.index], num_tensors[stage.index] = here, count
    used = [name for name in originals.files if any(name in here for here in ranges.values())]
    numbers = {name: number for number, name in enumerate(used)}
    return References(
        virtual=_pin(used, originals, checkpoint) if used else None,
        spans={index: tuple(_spans(here, numbers)) for index, here in ranges.items()},
        num_tensors=num_tensors,
    )


def _check_names(checkpoint: Checkpoint) -> None:
    if checkpoint.manifest is None and checkpoint.source.kind == "delta":
        problem = "is a version of a chain, and virtual bundles can only refer to the files of a Hugging Face folder"
        raise _not_virtual(checkpoint.location, problem, "pack all stages,")
    if not checkpoint.shape.base:  # stored names are FQNs
        return
    for shard in checkpoint.record.shards:
        for entry in shard.header.tensors:
            if (fqn := checkpoint.shape.fqn_of(entry.name)) != entry.name:
                problem = f"is {fqn} in the model, but virtual bundles cannot rename tensors"
                raise _not_virtual(f"{shard.name}: {entry.name!r}", problem, "pack all stages,")


def _spans(here: Mapping[str, Sequence[Range]], numbers: Mapping[str, int]) -> list[Span]:
    merged = sorted((numbers[name], begin, end) for name, ranges in here.items() for begin, end in merge_ranges(ranges))
    return [Span(file=number, begin=begin, end=end) for number, begin, end in merged]


def _pin(used: Sequence[str], originals: OriginalFiles, checkpoint: Checkpoint) -> Virtual:
    digests = {shard.name: shard.digest for shard in checkpoint.record.shards}
    return Virtual(
        location=originals.location,
        revision=originals.revision,
        files=tuple(
            OriginalFile(path=name, nbytes=file.nbytes, pin=file.fingerprint, digest=digests[name])
            for name, file in ((name, originals.files[name]) for name in used)
        ),
    )


def _not_virtual(where: str, problem: str, otherwise: str) -> InputError:
    hint = f"{otherwise} without {Parameter('virtual', True)}"
    return InputError(where, problem, hint, code="options.cannot-be-virtual")
