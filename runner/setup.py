"""A run made ready: stages built, filled from a checkpoint, tied and scheduled. Every rank does this."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from manifests.errors import InputError, UnreachableError
from manifests.schema import MOMENTS, WEIGHTS, Holds, TrainingState
from manifests.store import parent_of
from runner.bundle.packed import Packed, open_packed
from runner.checkpoint.resume import check_fits, differences, endings, goes_on_from, remembered
from runner.checkpoint.save import Job
from runner.checkpoint.state import Held, held_state, held_weights
from runner.config.flags import TrainOptions, recall
from runner.data.batches import Batch, rows_of
from runner.distributed.fail_together import from_rank_0, together
from runner.distributed.world import World
from runner.launch.combinations import check_combination, check_divides, combine, share_of
from runner.launch.preflight import notes
from runner.load.load import LoadReport
from runner.load.local_cache import CacheReport, local_cache_of
from runner.load.stored import Stored
from runner.metrics.gauges import memory_nbytes
from runner.models import Family, family_for
from runner.parallel.mesh import Mesh, build_mesh
from runner.parallel.parallelize import Parallel, is_sharded, parallelize
from runner.pipeline.chunk import StageChunk, build_chunks, hf_constants, hf_pieces, materialize
from runner.pipeline.schedule import build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import choose_timetable
from runner.profiling.clock import Clock
from runner.training.compute import arrange
from runner.training.gradient_norm import StepTotals
from runner.training.mixed_precision import keep_masters, kept, round_masters
from runner.training.optimizer import Optimizer
from runner.training.rng import begin_random, restore_random
from runner.training.step import Engine
from runner.training.ties import build_ties, check_equal, check_loaded, lead_parameters

__all__ = ["Ready", "begin"]

logger = logging.getLogger("runner")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What one rank trains, and the state that it goes on from; None: it begins at step 0."""

    options: TrainOptions  # with what the checkpoint remembers
    launched: Packed
    origin: Packed
    training: TrainingState | None
    chunks: tuple[StageChunk, ...]
    engine: Engine
    job: Job
    copied: CacheReport | None  # to the node's own disk
    loaded: LoadReport
    mesh: Mesh
    base_nbytes: int  # memory that this process had before it built its stages

    def rows_of(self, batch: Batch) -> Batch:
        """Give this rank's rows of a batch: those that its pipeline takes."""
        return rows_of(batch, self.mesh.data_rank, self.mesh.degrees.data)

    def held_state(self) -> Held:
        """Give what this rank writes of the weights and moments, as a checkpoint stores them."""
        ties, engine = self.launched.manifest.ties, self.engine
        return held_state(self.chunks, ties, engine.ties, engine.optimizer, self.mesh.owns)

    def held_weights(self) -> Held:
        return held_weights(self.chunks, self.launched.manifest.ties, self.mesh.owns)


def begin(
    launched: Packed, folders: Sequence[Path], options: TrainOptions, world: World, device: torch.device
) -> Ready:
    """Make a run ready from the first of these folders that can be read; `folders` are the same on all ranks.

    Raises:
        UserError: on all ranks alike, as for the first folder.
    """
    with together("ranks"):
        degrees = options.degrees.resolve(launched.manifest.layout.num_ranks, world.size)
    mesh = build_mesh(degrees, world.rank, device, timedelta(seconds=options.timeout_s))
    if world.rank == 0 and degrees.per_stage > 1:
        logger.info("%d ranks: %s", world.size, degrees)
    first: InputError | None = None
    for folder in folders:
        try:
            return _begin(launched, folder, options, mesh, world, device)
        except UnreachableError:  # an older one would throw steps away: this one may be had at the next attempt
            raise
        except InputError as error:
            first = first or _without_frames(error)
            if world.rank == 0 and len(folders) > 1:
                logger.warning("warning: %s cannot be resumed: %s", folder, error)
        gc.collect()  # the stages of this attempt: what raised and the frames that it came through hold each other
    assert first is not None, "there is always a manifest to begin with"
    raise first


def _without_frames(error: InputError) -> InputError:
    """Give the same error, holding nothing of what was there when it was raised."""
    return error.changed()


def _begin(
    launched: Packed, folder: Path, options: TrainOptions, mesh: Mesh, world: World, device: torch.device
) -> Ready:
    with together("load"):
        origin = launched if folder == launched.root else open_packed(folder)
        said = check_fits(origin, launched)
        said += tuple(
            f"{name} is not among the files of {launched.where}: it is not verified" for name in launched.unnamed
        )
        training = goes_on_from(origin, options.resume, is_launched=folder == launched.root)
        asked = options
        if training is not None:
            said += differences(options, training)
            options = recall(options, remembered(training))
            said += endings(options, training)
        said += (*notes(asked, options, origin.manifest, training), *_beyond_positions(launched, options))
        job = _job_of(launched, origin, options, mesh)
        cache = local_cache_of(launched, origin, options, mesh, world, has_moments=training is not None)
        stored = Stored(
            origin=origin,
            cache=cache,
            group=mesh.stage,
            is_broadcast=options.degrees.load == "broadcast",
            device=device,
        )
        check_divides(launched.config, mesh.degrees.tensor)
        family = family_for(launched.config, max_seq_len=options.batch.seq_len)
        base_nbytes = memory_nbytes(device)
        chunks = _build(family, launched, options, mesh, device)
        weights = [piece for chunk in chunks for piece in (*hf_pieces(chunk, kept), *hf_constants(chunk))]
    copied = cache.ensure() if cache else None  # loading verifies what is read
    report = stored.load(weights, WEIGHTS)
    with together("load"):
        round_masters(parameter for chunk in chunks for parameter in chunk.parameters())
        check_loaded(launched.manifest.ties, chunks)
    _say_loaded(report, chunks, mesh)
    engine = _build_engine(launched, chunks, options, mesh, device)
    check_equal(engine.ties)
    begin_random(options.data.seed, mesh.rank // mesh.degrees.tensor)
    if training is not None:
        for holds in MOMENTS:
            moment = partial(_moment, engine.optimizer, holds=holds)
            moments = [piece for chunk in chunks for piece in hf_pieces(chunk, moment)]
            stored.load(moments, holds)
            check_equal(engine.ties, of=partial(engine.optimizer.moment, moment=holds))
        engine.optimizer.resume(training.step)
        with together("load"):
            is_restored = restore_random(training.random, mesh.rank, mesh.degrees.world_size, device)
        if not is_restored:
            said += (
                f"no random states of {mesh.degrees.world_size} ranks on {device.type} were saved: they begin anew",
            )
    if mesh.rank == 0:
        _say_begun(origin, training, said)
    return Ready(
        options=options,
        launched=launched,
        origin=origin,
        training=training,
        chunks=chunks,
        engine=engine,
        job=job,
        copied=copied,
        loaded=report,
        mesh=mesh,
        base_nbytes=base_nbytes,
    )


def _job_of(launched: Packed, origin: Packed, options: TrainOptions, mesh: Mesh) -> Job:
    return Job(
        manifest=launched.manifest,
        root=launched.root,
        parents=(*origin.manifest.parents, parent_of(origin.root, origin.location)),
        named=None if options.resume.source in (None, "auto") else origin.root,
        writer=mesh.writer,
        num_writers=mesh.num_writers,
    )


def _build(
    family: Family, launched: Packed, options: TrainOptions, mesh: Mesh, device: torch.device
) -> tuple[StageChunk, ...]:
    """Build this rank's stages, and no others, and give them memory."""
    chunks = build_chunks(family, launched.stage_modules, launched.manifest.placement.stages_on(mesh.pipeline_rank))
    is_fsdp, compute = is_sharded(mesh, options.compute), options.compute
    dtype = _DTYPES[compute.master_dtype if is_fsdp else compute.dtype]
    for chunk in chunks:
        chunk.to(dtype)
        parallelize(chunk, mesh, compute)
        materialize(chunk, device=device, dtype=dtype)
    if compute.has_masters and not is_fsdp:
        keep_masters(chunks, _DTYPES[compute.master_dtype])
    return chunks


def _build_engine(
    launched: Packed, chunks: tuple[StageChunk, ...], options: TrainOptions, mesh: Mesh, device: torch.device
) -> Engine:
    """Tie, schedule and optimize what was loaded; this creates process groups."""
    placement = launched.manifest.placement
    with together("schedule"):
        batch = share_of(options.batch, mesh.degrees.data)
        timetable = choose_timetable(options.schedule, launched.manifest, batch.num_microbatches)
        check_combination(combine(launched.manifest, options, timetable, mesh.degrees))
    timetable = from_rank_0(timetable)  # on another machine, a file of that name may be another one
    metadata = plan_stage_metadata(chunks[0].family, launched.stage_modules, _DTYPES[options.dtype])
    ties = build_ties(launched.manifest.ties, chunks, placement, timedelta(seconds=options.timeout_s), mesh.pipelines)
    parameters = lead_parameters(chunks, ties)
    with together("compute"):
        arrange(chunks, placement.num_stages, options.compute)
    parallel = Parallel(mesh=mesh, chunks=chunks, reduce_dtype=_DTYPES[options.compute.reduce_dtype])
    parallel.reshard()
    clock = Clock(timetable.planned(batch.num_microbatches), mesh.pipeline_rank)
    return Engine(
        schedule=build_schedule(timetable, chunks, metadata, batch, mesh.pipeline),
        ties=ties,
        totals=StepTotals(parameters, ties, device=device, mesh=mesh, num_times=clock.num_times),
        optimizer=Optimizer(parameters, options.optim),
        parallel=parallel if mesh.degrees.per_stage > 1 else None,
        clock=clock,
    )


def _moment(optimizer: Optimizer, parameter: torch.nn.Parameter, *, holds: Holds) -> torch.Tensor | None:
    return optimizer.moment(parameter, holds) if optimizer.steps(parameter) else None


def _say_loaded(report: LoadReport, chunks: Sequence[StageChunk], mesh: Mesh) -> None:
    stages = ", ".join(str(chunk.stage) for chunk in chunks)
    logger.info(
        "[rank %d stage %s] loaded %d tensors, %.2f GiB in %.2f s, %.2f GiB/s%s",
        mesh.rank, stages, report.num_tensors, report.nbytes / 2**30, report.load_s,
        report.nbytes / 2**30 / report.load_s,
        f"; read {report.verified_nbytes / 2**30:.2f} GiB to verify parts" if report.verified_nbytes else "",
    )  # fmt: skip
    if report.num_unverified:
        logger.warning(
            "[rank %d stage %s] warning: %d tensors of virtual bundles have no digest: the size, time and header of "
            "their files were checked, their bytes were not",
            mesh.rank, stages, report.num_unverified,
        )  # fmt: skip


def _beyond_positions(launched: Packed, options: TrainOptions) -> tuple[str, ...]:
    """Say that rotary positions are asked for that the model was not made for: they can be computed, all the same."""
    seq_len, most = options.batch.seq_len, launched.config.get("max_position_embeddings")
    if not isinstance(most, int) or seq_len <= most:
        return ()
    return (f"--seq-len {seq_len} is beyond the {most} of max_position_embeddings in config.json",)


def _say_begun(origin: Packed, training: TrainingState | None, said: Sequence[str]) -> None:
    if training is not None:
        logger.info("going on from %s: step %d, %d tokens", origin.root, training.step, training.num_tokens)
    elif (left := origin.manifest.training) is not None and left.optimizer is not None:
        logger.info(
            "beginning at step 0 with the weights of %s: the moments of %s, step %d, the learning rate's schedule, "
            "the data's position and the random states stay behind",
            origin.root, left.optimizer.name, left.step,
        )  # fmt: skip
    for sentence in said:
        logger.info("note: %s", sentence)
