"""A pack from options to result: open the source, convert, lay out, then write all of it or one part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from manifests.errors import Parameter
from manifests.index import MOST_READ_HEADER_NBYTES
from reshard.copy.destination import check_apart
from reshard.copy.parallelism import read_twice
from reshard.copy.progress import Progress, counting
from reshard.estimate.assumptions import Assumptions
from reshard.formats.open import open_described
from reshard.formats.source_files import with_source_files
from reshard.packing.options import PackOptions
from reshard.packing.pack import pack
from reshard.packing.parts import pack_part
from reshard.packing.resolve import LaidOut, PlanResult, estimate_step, is_solved, lay_out, model_name
from reshard.packing.result import PackResult
from reshard.plans.pack_plan import OutputShard, Sharding, Traffic, plan_pack, traffic_of
from reshard.plans.partition import check_num_parts, shards_of_part
from reshard.plans.references import choose_stages
from reshard.transforms.conversion import convert
from stores.address import hub_output, place_of
from stores.bundles import TensorAt
from stores.folders.publish import check_not_a_step


@dataclass(frozen=True, kw_only=True)
class PreparedPack:
    """A pack that is ready to run: its source is open and laid out, and nothing is written yet."""

    options: PackOptions
    laid: LaidOut
    stages: frozenset[int] | None  # to pack; None: all

    @cached_property
    def shards(self) -> tuple[OutputShard, ...]:
        return self.laid.plan.shards_on(self.stages)

    @cached_property
    def written(self) -> tuple[OutputShard, ...]:
        """The shards to write: all, or those of the part."""
        part = self.options.part
        return self.shards if part is None else shards_of_part(self.shards, part)

    @cached_property
    def read_twice(self) -> list[TensorAt]:
        is_on_hub = hub_output(self.options.out) is not None  # a folder is packed, and pushed
        return [] if is_on_hub else read_twice(self.written, self.options.out, self.options.write.parallelism)

    @property
    def planned(self) -> PlanResult:
        """The plan and the estimate of a training step, as `reshard plan` shows them."""
        return estimate_step(self.laid)

    @property
    def traffic(self) -> Traffic:
        """The bytes that this pack, or its part, reads and writes."""
        return traffic_of(self.written, self.read_twice)

    @cached_property
    def nbytes(self) -> int:
        """The bytes that progress counts."""
        origins = (origin for shard in self.written for origin in shard.origins)
        return sum(tensor.nbytes for tensor in (*self.read_twice, *origins))

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """The source's files that are symbolic links out of its folder, with their targets."""
        return self.laid.links

    @property
    def large_headers(self) -> tuple[OutputShard, ...]:
        """The shards whose headers are too long for huggingface_hub and huggingface.js, which refuse above 25 MB."""
        return tuple(shard for shard in self.shards if shard.header_nbytes > MOST_READ_HEADER_NBYTES)

    @property
    def assumed_step(self) -> str | None:
        """The training step for which the layout was solved, in words; None if it was not solved."""
        if not is_solved(self.options.layout.spec):
            return None
        layout, assumed = self.laid.layout, self.laid.assumed
        return (
            f"{layout.spec} is solved for {assumed.schedule_for(layout)}, {assumed.microbatches_for(layout.placement)} "
            f"microbatches of {assumed.microbatch} x {assumed.seq_len} tokens in {assumed.policy}"
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Weight files of the source that transformers ignores, since there are safetensors files."""
        return self.laid.checkpoint.source.left_out

    def into(self, folder: Path) -> PreparedPack:
        """Return the same pack to a folder of ours, such as one that is pushed later."""
        return replace(self, options=replace(self.options, out=folder, force=True))

    def run(self, progress: Progress | None = None) -> PackResult:
        """Write the bundles and, last, the manifest that commits them; or one part.

        Raises as `reshard.packing.pack.pack` and `pack_part`.
        """
        write = replace(self.options.write, progress=counting(progress, self.nbytes))
        options = replace(self.options, write=write)
        if options.part is None:
            return pack(self.laid.checkpoint, self.laid.plan, options)
        pack_part(self.laid.checkpoint, self.laid.plan, options.part, options)
        part = options.part
        return PackResult(
            out=options.out, part=f"{part.number}/{part.of}", part_nbytes=self.nbytes, used=write.parallelism.used
        )


def prepare_pack(source: str, options: PackOptions) -> PreparedPack:
    """Open the source, convert it, lay it out and check the output's location, without writing anything.

    Raises:
        UsageError: options conflict, there is no such stage, or there are more parts than shards.
        SourceError, ModelError, ShardError, ManifestError: the source is incomplete, damaged or unsupported.
        LayoutError: the layout is invalid, or does not cover the model.
        OutputError: `out` would overwrite what is read.
    """
    options.check()
    opened = open_described(source, frozenset(options.drop), options.model)
    check_apart(options.out, opened, may_replace=not options.conversion.changes_bytes)
    if options.force and isinstance(options.out, Path) and place_of(options.out) != place_of(opened.location):
        check_not_a_step(options.out)
    checkpoint = convert(opened, options.conversion)
    if options.conversion.changes_bytes:
        checkpoint = replace(checkpoint, auxiliary=tuple(with_source_files(checkpoint.auxiliary, is_same=False)))
    sharding = Sharding(max_nbytes=options.max_shard_nbytes)
    laid = lay_out(model_name(source), checkpoint, options.layout, Assumptions(), sharding)
    stages = choose_stages(laid.plan, options.virtual, options.stages)
    if stages and len(stages) < len(laid.stages):  # others could take the root's shards for the whole model
        plan = plan_pack(checkpoint, laid.layout, replace(sharding, in_stage_folders=True))
        laid = replace(laid, plan=plan)
    prepared = PreparedPack(options=options, laid=laid, stages=stages)
    if options.part is not None:
        check_num_parts(Parameter("part"), options.part.of, prepared.shards)
    return prepared
