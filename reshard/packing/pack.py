"""A pack from options to result: open the source, convert, lay out, then write all of it or one part."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from manifests.errors import Parameter, as_texts, check_count
from manifests.index import MAX_SHARD_NBYTES, MOST_READ_HEADER_NBYTES
from reshard.copy.destination import check_apart
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism, read_twice
from reshard.copy.runs import Progress, counting
from reshard.estimate.assumptions import Assumptions
from reshard.formats.auxiliary import with_source_files
from reshard.formats.open import open_with_model_file
from reshard.packing.bundles import choose_stages, write_bundles
from reshard.packing.options import PackOptions, PackResult, Part, check_num_parts, parse_part, shards_of_part
from reshard.packing.parts import write_part
from reshard.packing.plan import LayoutRequest, PlanResult, StagedModel, estimate_step, is_solved, lay_out, model_name
from reshard.plans.pack_plan import OutputShard, Sharding, Traffic, plan_pack, traffic_of
from reshard.tensors.checkpoint import Checkpoint
from reshard.transforms.conversion import Conversion, convert
from stores.address import HubAddress, hub_output, output_address, place_of
from stores.bundles import TensorAt
from stores.direct_io import Io
from stores.folders.publish import check_not_a_step


@dataclass(frozen=True, kw_only=True)
class PreparedPack:
    """A pack that is ready to run: its source is open and laid out, and nothing is written yet."""

    options: PackOptions
    staged: StagedModel
    stages: frozenset[int] | None  # to pack; None: all

    @cached_property
    def shards(self) -> tuple[OutputShard, ...]:
        return self.staged.plan.shards_on(self.stages)

    @cached_property
    def written(self) -> tuple[OutputShard, ...]:
        part = self.options.part
        return self.shards if part is None else shards_of_part(self.shards, part)

    @cached_property
    def read_twice(self) -> list[TensorAt]:
        is_on_hub = hub_output(self.options.out) is not None  # a folder is packed, and pushed
        return [] if is_on_hub else read_twice(self.written, self.options.out, self.options.write.parallelism)

    @property
    def planned(self) -> PlanResult:
        """The plan and the estimate of a training step, as `reshard plan` shows them."""
        return estimate_step(self.staged)

    @property
    def traffic(self) -> Traffic:
        return traffic_of(self.written, self.read_twice)

    @cached_property
    def nbytes(self) -> int:
        origins = (origin for shard in self.written for origin in shard.origins)
        return sum(tensor.nbytes for tensor in (*self.read_twice, *origins))

    @property
    def large_headers(self) -> tuple[OutputShard, ...]:
        """The shards whose headers are too long for huggingface_hub and huggingface.js, which refuse above 25 MB."""
        return tuple(shard for shard in self.shards if shard.header_nbytes > MOST_READ_HEADER_NBYTES)

    @property
    def assumed_step(self) -> str | None:
        """The training step for which the layout was solved, in words; None if it was not solved."""
        if not is_solved(self.options.layout.spec):
            return None
        layout, assumed = self.staged.layout, self.staged.assumed
        return (
            f"{layout.spec} is solved for {assumed.schedule_for(layout)}, {assumed.microbatches_for(layout.placement)} "
            f"microbatches of {assumed.microbatch} x {assumed.seq_len} tokens in {assumed.dtypes}"
        )

    def into(self, folder: Path) -> PreparedPack:
        """Return the same pack to a folder of ours, such as one that is pushed later."""
        return replace(self, options=replace(self.options, out=folder, force=True))

    def run(self, progress: Progress | None = None) -> PackResult:
        """Write the bundles and, last, the manifest that commits them; or one part."""
        write = replace(self.options.write, progress=counting(progress, self.nbytes))
        options, checkpoint, plan = replace(self.options, write=write), self.staged.checkpoint, self.staged.plan
        if options.part is None:
            return write_bundles(checkpoint, plan, options, self.stages)
        write_part(checkpoint, plan, options.part, options, self.stages)
        used = write.parallelism.used
        return PackResult(out=options.out, part=options.part, part_nbytes=self.nbytes, used=used)


def prepare_pack(source: str, options: PackOptions, opened: Checkpoint | None = None) -> PreparedPack:
    """Open the source unless `opened`, convert it, lay it out and check the output's location; write nothing."""
    options.check()
    opened = opened or open_with_model_file(source, frozenset(options.drop), options.model)
    check_apart(options.out, opened, may_replace=not options.conversion.changes_bytes)
    if options.force and isinstance(options.out, Path) and place_of(options.out) != place_of(opened.location):
        check_not_a_step(options.out)
    checkpoint = convert(opened, options.conversion)
    if options.conversion.changes_bytes:
        checkpoint = replace(checkpoint, auxiliary=tuple(with_source_files(checkpoint.auxiliary, is_same=False)))
    sharding = Sharding(max_nbytes=options.max_shard_nbytes)
    staged = lay_out(model_name(source), checkpoint, options.layout, Assumptions(), sharding)
    stages = choose_stages(staged.plan, options.virtual, options.stages)
    if stages and len(stages) < len(staged.stages):  # others could take the root's shards for the whole model
        plan = plan_pack(checkpoint, staged.layout, replace(sharding, in_stage_folders=True))
        staged = replace(staged, plan=plan)
    prepared = PreparedPack(options=options, staged=staged, stages=stages)
    if options.part is not None:
        check_num_parts(Parameter("part"), options.part.of, prepared.shards)
    return prepared


def pack(
    source: str | Path,
    out: str | Path,
    layout: str | None = None,
    *,
    pp: int | None = None,
    drop: Collection[str] = (),
    model: str | Path | None = None,
    conversion: Conversion | None = None,
    init: int | None = None,
    virtual: bool = False,
    stages: str | None = None,
    part: str | Part | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    force: bool = False,
    io: Io = "direct",
    sync: bool = True,
    parallelism: Parallelism | None = None,
    verify_source: bool = False,
    on_plan: Callable[[PreparedPack], object] = lambda plan: None,
    progress: Progress | None = None,
) -> PackResult:
    """Write one bundle per pipeline stage, an index and, last, the manifest that commits them.

    The output is a Hugging Face folder too, which transformers and others load: its shards are in the root, each with
    tensors of at most `max_shard_nbytes`. It has no index, and its shards are in folders, if bundles are virtual or
    tensors are in slices.

    `source`, `layout`, `pp`, `drop` and `model` are those of `plan`; the manifest records what `model` says. With a
    manifest as `source` this reshards it, optimizer state included. `out` is a folder, an object-store URL, or
    `hf://org/name[@branch]`: then a folder below HF_HOME is packed, pushed and removed (`push`). `conversion` casts,
    dequantizes or merges slices. With `init`, a seed, `source` is a config.json, and the weights are those that
    transformers initializes the model with, in the dtype of `conversion` or the config. With `virtual`, bundles refer
    to the source's bytes instead of copying them; `stages` (`0-3,7`) packs only these, and the others become virtual.
    `part` (`2/8`) packs that part of the shards, here or on another machine, and `commit` merges all of them. `force`
    replaces an existing folder in one step; in a bucket, an unfinished output. `io` selects direct or buffered writes,
    `sync` flushes them to disk; `parallelism` sets threads, concurrent requests and their memory. `verify_source`
    compares whole files with the hub's SHA-256.

    `on_plan` is called with what will be written, before anything is; it may raise to stop there.

    A folder without manifest.json is not a checkpoint. To resume an interrupted pack, call it again.

    Units: `nbytes` in bytes; progress is called with bytes done and bytes in total.
    Raises:
        SourceError, ModelError, ShardError, ManifestError: the source is incomplete, damaged or unsupported, or was
            changed while it was read.
        StoreError: the source does not exist, or cannot be reached.
        LayoutError: the layout is invalid, or does not cover the model.
        OutputError: `out` exists (`output.exists`) or cannot be written.
        UsageError: arguments conflict.

    Example:
        >>> done = reshard.pack("model", "model-pp2", "pp=2")
        >>> done.num_stages, done.num_tensors, done.path
        (2, 39, 'model-pp2/manifest.json')
        >>> reshard.pack("model-pp2", "model-pp4", "pp=4").num_stages
        4
    """
    options = PackOptions(
        out=output_address(out),
        layout=LayoutRequest(spec=layout, num_ranks=pp),
        conversion=conversion or Conversion(),
        drop=as_texts(drop),
        model=None if model is None else Path(model),
        virtual=virtual,
        stages=stages,
        part=parse_part(part) if isinstance(part, str) else part,
        max_shard_nbytes=check_count(Parameter("max_shard_nbytes"), max_shard_nbytes),
        init=init,
        force=force,
        write=WriteOptions(io=io, sync=sync, parallelism=parallelism or Parallelism()),
        verify_source=verify_source,
    )
    if init is not None:
        from reshard.packing.initialize import initial_model

        def on_config(options: PackOptions, opened: Checkpoint) -> None:
            on_plan(prepare_pack(str(source), options, opened))

        with initial_model(str(source), options, on_config, progress) as (options, opened):
            prepared = prepare_pack(str(source), options, opened)
            return prepared.run(progress and _after(prepared.nbytes, progress))
    prepared = prepare_pack(str(source), options)
    on_plan(prepared)
    if (address := hub_output(options.out)) is not None:
        return _pack_and_push(prepared, address, progress)
    return prepared.run(progress)


def _after(nbytes: int, progress: Progress) -> Progress:
    """Return the progress of what follows `nbytes` that are done."""
    return lambda done_nbytes, total_nbytes: progress(nbytes + done_nbytes, nbytes + total_nbytes)


def _pack_and_push(prepared: PreparedPack, address: HubAddress, progress: Progress | None) -> PackResult:
    """Pack to a folder below HF_HOME, push that, and remove it."""
    from reshard.packing.push import check_free, push_staged  # the hub's client
    from stores.hub.upload import staging_folder

    force, folder = prepared.options.force, staging_folder(address)
    check_free(address, force=force)
    done = prepared.into(folder).run(progress)
    push_staged(folder, address, force=force)
    return replace(done, out=prepared.options.out)
