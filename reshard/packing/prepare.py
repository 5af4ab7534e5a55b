"""A pack from request to result: open the source, convert, lay out, then write all of it or one part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from manifests.errors import Parameter, UsageError, check_choice
from manifests.index import MAX_SHARD_NBYTES, MOST_READ_HEADER_NBYTES
from reshard.copy.destination import check_apart, read_twice
from reshard.copy.direct_io import Io
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism
from reshard.copy.progress import Progress, counting
from reshard.estimate.assumptions import Assumptions
from reshard.formats.open import open_described
from reshard.formats.source_files import with_source_files
from reshard.packing.divide import Division
from reshard.packing.hub_check import HubReport
from reshard.packing.pack import PackOptions, pack
from reshard.packing.parts import pack_part
from reshard.packing.resolve import LaidOut, LayoutRequest, PlanResult, estimate_step, is_solved, lay_out, model_name
from reshard.packing.result import PackResult
from reshard.plans.pack_plan import OutputShard, Sharding, Traffic, plan_pack, traffic_of
from reshard.plans.partition import shards_of_part
from reshard.plans.references import choose_stages
from reshard.transforms.conversion import Conversion, convert
from stores.address import HubAddress, hub_output, is_url, place_of
from stores.bundles import TensorAt
from stores.folders.publish import check_not_a_step, check_not_mounted
from stores.open import Address


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRequest:
    """The options of `reshard pack`. `stages` is written as `0-3,7`; None packs all of them."""

    source: str
    out: Address
    asked: LayoutRequest
    conversion: Conversion = field(default_factory=Conversion)
    drop: Collection[str] = ()
    model: Path | None = None  # the file that describes the source
    virtual: bool = False
    stages: str | None = None
    division: Division = field(default_factory=Division)
    force: bool = False
    io: Io = "direct"
    sync: bool = True
    parallelism: Parallelism = field(default_factory=Parallelism)
    verify_source: bool = False
    max_shard_nbytes: int = MAX_SHARD_NBYTES

    def check(self) -> None:
        """Refuse options that conflict, before a source is opened.

        Raises:
            UsageError: naming the flag.
            OutputError: `out` is a mount point.
        """
        if not is_url(self.out):
            check_not_mounted(Path(self.out))
        self.conversion.check()
        check_choice(Parameter("io"), self.io, get_args(Io))
        self.division.check(self.out, virtual=self.virtual, verify_source=self.verify_source, force=self.force)
        if self.conversion.changes_bytes and (self.virtual or self.stages is not None):
            parameter = Parameter("virtual" if self.virtual else "stages")
            problem = "virtual bundles refer to the source's bytes, which cannot be converted"
            raise UsageError(parameter, problem, "pack without it", code="options.conflict")
        if hub_output(self.out) is not None and (self.virtual or self.stages is not None):
            parameter = Parameter("virtual" if self.virtual else "stages")
            problem = "virtual bundles refer to the source's bytes, which would not be uploaded"
            raise UsageError(parameter, problem, "pack without it", code="options.conflict")


@dataclass(frozen=True, kw_only=True)
class PreparedPack:
    """A pack that is ready to run: its source is open and laid out, and nothing is written yet."""

    request: PackRequest
    laid: LaidOut
    stages: frozenset[int] | None  # to pack; None: all

    @cached_property
    def shards(self) -> tuple[OutputShard, ...]:
        return self.laid.plan.shards_on(self.stages)

    @cached_property
    def written(self) -> tuple[OutputShard, ...]:
        """The shards to write: all, or those of the part."""
        part = self.request.division.part
        return self.shards if part is None else shards_of_part(self.shards, part)

    @cached_property
    def read_twice(self) -> list[TensorAt]:
        is_on_hub = hub_output(self.request.out) is not None  # a folder is packed, and pushed
        return [] if is_on_hub else read_twice(self.written, self.request.out, self.request.parallelism)

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
        if not is_solved(self.request.asked.spec):
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

    def run(self, progress: Progress | None = None) -> PackResult:
        """Write the bundles and, last, the manifest that commits them; raises as `reshard.packing.pack.pack`.

        With an `out` on the hub, a folder is packed and pushed; raises as `reshard.packing.push.push_folder`, too.
        """
        if (address := hub_output(self.request.out)) is not None:
            return self._run_and_push(address, progress)
        checked: list[HubReport] = []
        options = self._options(progress, report=checked)
        manifest = pack(self.laid.checkpoint, self.laid.plan, options)
        hub = checked[0] if checked else HubReport()
        return PackResult(manifest=manifest, out=self.request.out, hub=hub, used=self.request.parallelism.used)

    def _run_and_push(self, address: HubAddress, progress: Progress | None) -> PackResult:
        from reshard.packing.push import check_free, push_folder, staged

        check_free(address, force=self.request.force)
        with staged(address) as folder:
            here = replace(self, request=replace(self.request, out=folder, force=True))
            done = here.run(progress)
            push_folder(folder, address, force=self.request.force)
        return replace(done, out=self.request.out)

    def run_part(self, progress: Progress | None = None) -> None:
        """Write the request's part of the shards; raises as `pack_part`."""
        part = self.request.division.part
        assert part is not None, "requested by --part"
        pack_part(self.laid.checkpoint, self.laid.plan, part, self._options(progress, report=[]))

    def _options(self, progress: Progress | None, report: list[HubReport]) -> PackOptions:
        request = self.request
        write = WriteOptions(
            io=request.io,
            sync=request.sync,
            progress=counting(progress, self.nbytes),
            parallelism=request.parallelism,
        )
        return PackOptions(
            out=request.out,
            force=request.force,
            stages=self.stages,
            write=write,
            verify_source=request.verify_source,
            report=report.append,
        )


def prepare_pack(request: PackRequest) -> PreparedPack:
    """Open the source, convert it, lay it out and check the output's location, without writing anything.

    Raises:
        UsageError: options conflict, there is no such stage, or there are more parts than shards.
        SourceError, ModelError, ShardError, ManifestError: the source is incomplete, damaged or unsupported.
        LayoutError: the layout is invalid, or does not cover the model.
        OutputError: `out` would overwrite what is read.
    """
    request.check()
    opened = open_described(request.source, frozenset(request.drop), request.model)
    check_apart(request.out, opened, may_replace=not request.conversion.changes_bytes)
    if request.force and isinstance(request.out, Path) and place_of(request.out) != place_of(opened.location):
        check_not_a_step(request.out)
    checkpoint = convert(opened, request.conversion)
    if request.conversion.changes_bytes:
        checkpoint = replace(checkpoint, auxiliary=tuple(with_source_files(checkpoint.auxiliary, is_same=False)))
    sharding = Sharding(max_nbytes=request.max_shard_nbytes)
    laid = lay_out(model_name(request.source), checkpoint, request.asked, Assumptions(), sharding)
    stages = choose_stages(laid.plan, request.virtual, request.stages)
    if stages and len(stages) < len(laid.stages):  # others could take the root's shards for the whole model
        plan = plan_pack(checkpoint, laid.layout, replace(sharding, in_stage_folders=True))
        laid = replace(laid, plan=plan)
    prepared = PreparedPack(request=request, laid=laid, stages=stages)
    request.division.check_shards(prepared.shards)
    return prepared
