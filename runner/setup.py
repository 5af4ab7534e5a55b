"""Make a run ready: build the stages, fill them from a checkpoint, tie and schedule them. Every rank does this."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain

import torch

from manifests.command.sizes import show_bytes
from manifests.errors import InputError, UnreachableError
from manifests.models.adapters import is_adapter
from manifests.models.combinations import check_combination, check_divides, check_heads
from manifests.models.training import HostMemory
from manifests.optimizer_groups import algorithm_of
from manifests.optimizer_state import EMA, kinds_of
from manifests.schema import WEIGHTS, TrainingState
from runner.bundle.packed import Packed
from runner.checkpoint.adapter_record import base_of, check_adapters, check_launched
from runner.checkpoint.peft_folder import load_adapters
from runner.checkpoint.resume import Origin, check_state_of_all, differing_steps
from runner.checkpoint.save import SaveContext
from runner.checkpoint.seen import ABSENT, see_all
from runner.checkpoint.state import Held, held_state, held_weights, whole_weights
from runner.config.flags import TrainOptions
from runner.config.memory import planned_memory
from runner.config.optimizers import check_copies
from runner.config.parallel_dims import is_sharded
from runner.config.trained import trained_by
from runner.data.sequences import Batch, Rows, rows_of
from runner.distributed.fail_together import check_same_option, from_all_ranks, raise_on_all_ranks
from runner.distributed.watchdog import StallTimer
from runner.distributed.world import World
from runner.load.deferred import DeferredVerification
from runner.load.load import LoadReport, Reading, stored_dtypes
from runner.load.local_cache import CacheReport, check_same_manifest, local_cache_of
from runner.load.stored import StageLoader
from runner.metrics.gauges import memory_nbytes
from runner.models import family_of
from runner.models.family import Family
from runner.parallel.mesh import Mesh, build_mesh
from runner.parallel.parallelize import check_plans, split_rows
from runner.pipeline.chunk import StageChunk, hf_constants, hf_pieces
from runner.pipeline.losses import Loss, loss_of_run
from runner.pipeline.timetable import Timetable
from runner.preflight.combinations import combine, part_of, sharing_ranks, timetable_of
from runner.preflight.start import Start, log_start, read_start
from runner.proof.combination import Combination
from runner.proof.options import RunOptions, self_check
from runner.proof.proving import OF_COMBINATION, prove_once
from runner.proof.stages import SelfChecked
from runner.tensors.heap import set_up_heap
from runner.training.build import Stages, apply_model_options, build_engine, build_stages, names_of, ties_of
from runner.training.mixed_precision import master_of, round_masters
from runner.training.rng import restore_rng, seed_rng
from runner.training.step import Engine
from runner.training.ties import check_equal, check_loaded
from stores.workers import threads_for_ranks

logger = logging.getLogger("runner")
# Codes of errors of flags, of a node (its cache, an outdated copy, its disk or memory), of files that this user may not
# read, and of checkpoints that a later version of this package has written.
_UNDAMAGED = (
    "launch.", "options.", "output.", "resume.", "schedule.", "store.unreadable", "manifest.differs-between-ranks",
    "manifest.unsupported-version", "shard.readings-differ",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What one rank trains, and the state that it resumes from; None: it starts at step 0."""

    options: TrainOptions  # with the values that the checkpoint recalls
    launched: Packed
    origin: Packed
    training: TrainingState | None
    chunks: tuple[StageChunk, ...]
    engine: Engine
    save_context: SaveContext
    copied: CacheReport | None  # to the node's own disk
    loaded: LoadReport
    deferred: DeferredVerification
    mesh: Mesh
    base_nbytes: int  # memory that this process used before it built its stages
    planned_nbytes: int  # memory that is planned beyond that

    @property
    def num_steps(self) -> int:
        """How many steps were taken before this run."""
        return self.training.step if self.training else 0

    def rows_of(self, batch: Batch) -> Batch:
        """Return the rows of a batch that this rank's pipeline trains on."""
        return rows_of(batch, self.rows).part(*self.parts)

    @property
    def parts(self) -> tuple[int, int]:
        """Which part of each row this rank trains on, of how many."""
        return self.mesh.context_rank, self.mesh.degrees.context

    @property
    def rows(self) -> Rows:
        """Which rows of each batch this rank's pipeline trains on."""
        return Rows(number=self.mesh.data_rank, count=self.mesh.degrees.data)

    def held_state(self) -> Held:
        """Return the weights and optimizer state that this rank writes, as a checkpoint stores them."""
        ties, engine = self.launched.manifest.ties, self.engine
        return held_state(self.chunks, ties, engine.ties, engine.optimizer, self.mesh.owns)

    def differing_steps(self, num_steps: int) -> dict[str, int]:
        """Return the step counts of this rank's parameters that are not `num_steps`, by FQN."""
        counts = (self.engine.optimizer.differing_steps(chunk, num_steps) for chunk in self.chunks)
        return {fqn: count for of_chunk in counts for fqn, count in of_chunk.items()}

    def held_weights(self) -> Held:
        """Return the weights that this rank writes."""
        return held_weights(self.chunks, self.launched.manifest.ties, self.mesh.owns)

    def published_weights(self) -> Held:
        """Return the whole weights that this rank publishes: a part of its stages'. Every rank calls this."""
        if self.mesh.num_writers == 1:
            return self.held_weights()
        return self._gather(None if self.mesh.replicate_rank else self.mesh.writer, self.mesh.num_writers)

    def whole_weights(self) -> tuple[Held, SaveContext]:
        """Gather whole weights on one rank of each stage, and return what this rank saves of them, and how.

        Every rank calls this.
        """
        is_writer = self.mesh.replicate_rank == self.mesh.writer == 0
        return self._gather(0 if is_writer else None, 1), replace(self.save_context, num_writers=1)

    def _gather(self, writer: int | None, num_writers: int) -> Held:
        ties = self.launched.manifest.ties
        return whole_weights(self.chunks, ties, writer=writer, num_writers=num_writers, sharing=self.mesh.stage)


def begin(
    launched: Packed, origins: Sequence[Origin], options: TrainOptions, world: World, device: torch.device
) -> Ready:
    """Make a run ready from the first of these origins that can be read; their folders are the same on all ranks.

    An older one is for a damaged checkpoint alone: it loses steps, and newer ones are set aside as it comes to them.
    """
    with raise_on_all_ranks("ranks"):
        degrees = options.degrees.resolve(launched.manifest.layout.num_ranks, world.size)
    mesh = build_mesh(degrees, world.rank, device, timedelta(seconds=options.timeout_s))
    if world.rank == 0 and options.checkpoint is not None and mesh.num_writers > 1:
        logger.info("note: checkpoints are in slices, and not Hugging Face folders; --save merges them")
    first: InputError | None = None
    queue, again = [*origins], None
    while queue:
        origin = queue.pop(0)
        try:
            ready = _begin(launched, origin, options, mesh, world, device)
            ready.deferred.older = tuple(other.folder for other in queue)
            return ready
        except UnreachableError:  # this one may be readable at the next attempt
            raise
        except InputError as error:
            if error.code in OF_COMBINATION or error.code.startswith(_UNDAMAGED):
                raise
            is_lagging = error.code in ABSENT and origin.folder != launched.root and see_all(origin.folder)
            if is_lagging and again is not origin:  # all see it now
                queue, again = [origin, *queue], origin
            else:
                first = first or error.changed()  # a copy, which keeps no frames and so none of their tensors alive
                if world.rank == 0 and len(origins) > 1:
                    logger.warning("warning: %s cannot be resumed: %s", origin.folder, error)
        gc.collect()  # frees the stages of this attempt: the exception and the frames of its traceback form a cycle
    assert first is not None, "there is always a manifest to start from"
    raise first


def _begin(
    launched: Packed, found: Origin, options: TrainOptions, mesh: Mesh, world: World, device: torch.device
) -> Ready:
    """Read the checkpoint, build and fill this rank's stages, tie and schedule them, and resume the optimizer."""
    with raise_on_all_ranks("load"):
        start = read_start(launched, found, options)
        options, origin, training = start.options, start.origin, start.training
        named = None if options.resume.source in (None, "auto") else origin.root
        save_context = SaveContext.of(launched, origin, num_writers=mesh.num_writers, named=named)
        if mesh.rank == 0:
            save_context = save_context.with_contents()
        check_launched(launched)
        check_adapters(origin, options, training)
        start = replace(start, notes=(*start.notes, *check_state_of_all(origin, options, training)))
        steps = {} if training is None else differing_steps(origin)
        base = base_of(launched, origin)
        has_moments = training is not None and base is origin
        cache = local_cache_of(launched, base, options, mesh, world, has_moments=has_moments)
        hashes = options.digests == "foreground"
        timer = StallTimer(options.timeout_s)
        deferred = DeferredVerification(cache, timer, is_needed=not hashes)
        stored = StageLoader(
            origin=base,
            cache=cache,
            group=mesh.stage,
            is_broadcast=options.degrees.load == "broadcast",
            device=device,
            how=Reading(num_threads=threads_for_ranks(world.local_size), hashes=hashes, timer=timer),
            deferred=deferred,
        )
        check_divides(launched.shape, launched.config, mesh.degrees.tensor, mesh.degrees.expert)
        check_heads(launched.config, options.degrees.context, options.degrees.context_method, options.degrees.tensor)
        timetable = timetable_of(launched.manifest, options, mesh.degrees)
        features = combine(launched.manifest, options, timetable, mesh.degrees)
        check_combination(features)
        planned_nbytes = _plan_memory(launched, options, timetable, mesh, world, device)
        family = family_of(launched, options.batch.seq_len)
        if not isinstance(family, SelfChecked):
            check_combination(replace(features, is_generic=True, is_unverified=True))
        check_plans(family, mesh.degrees)
        loss = loss_of_run(options, is_split=mesh.degrees.context > 1)
        apply_model_options(family, options)
        if mesh.degrees.context > 1:
            split_rows(family, mesh, options.degrees.context_method, options.batch.seq_len)
        world.start.end("manifest_s")
    check_same_manifest(origin.where, origin.read.digest)
    check_same_option("--optimizer", options.optim.plan)
    check_same_option("--lora-from", options.lora)
    stages = Stages.of(launched)
    with raise_on_all_ranks("load"):
        base_nbytes = memory_nbytes(device)
        ties = ties_of(family, stages)
        assert options.optim.plan is not None, "made of what the checkpoint stores and the flags"
        check_copies(options.optim.plan, launched.shape, map(names_of, ties))
        trains = trained_by(options, map(names_of, ties))
        dtypes, here = dict[str, torch.dtype](), {*stages.placement.stages_on(mesh.pipeline_rank)}
        if options.train_only:
            # What is borrowed has the dtype of its owner, which sends it.
            here |= {group.owner.stage for group in ties if any(member.stage in here for member in group.members)}
        has_buffers = bool(launched.shape.untrained_suffixes) and options.lora is None
        if options.train_only or (has_buffers and options.compute.dtype == "bf16"):
            dtypes = stored_dtypes(chain.from_iterable(stages.modules[stage] for stage in here), base.bundles)
        chunks = build_stages(family, stages, options.compute, mesh, device, trains, dtypes)
        pieces = [
            piece for chunk in chunks for piece in (*hf_pieces(chunk, master_of), *hf_constants(chunk, master_of))
        ]
    world.start.end("build_s")
    weights = [piece for piece in pieces if not is_adapter(piece.fqn)]
    with stored.reading(weights) as pending:
        _run_self_check(family, launched, options, timetable, mesh, loss)
        world.start.end("self_check_s")
        if cache:
            cache.ensure()  # the loader verifies what it reads
        loaded = stored.load(weights, WEIGHTS, pending)
    if options.lora is not None:
        adapters = [piece for piece in pieces if is_adapter(piece.fqn)]
        stored, record = load_adapters(adapters, family, options, stored, origin)
        save_context = replace(save_context, adapters=record)
    elif trains is not None:
        names = from_all_ranks([fqn for chunk in chunks for fqn in chunk.trained_fqns()])
        save_context = replace(save_context, trained=tuple({fqn for of_rank in names for fqn in of_rank}))
    with deferred.comes_first(), raise_on_all_ranks("load"):
        round_masters(weight for chunk in chunks for weight in (*chunk.parameters(), *chunk.buffers()))
        check_loaded(ties, chunks)
    _log_loaded(loaded, chunks, mesh)
    batch = part_of(options.batch, mesh.degrees)
    engine = build_engine(stages, chunks, options, timetable, mesh, batch, loss)
    with deferred.comes_first():
        check_equal(engine.ties)
    seed_rng(options.data.seed, mesh.rank // mesh.degrees.tensor, 0 if training is None else training.step)
    if training is not None:
        start = _resume_optimizer(start, training, stored, engine, chunks, mesh, device)
        with raise_on_all_ranks("load"):
            engine.optimizer.resume(training.step, steps)
    deferred.start()
    if mesh.rank == 0:
        log_start(start)
    return Ready(
        options=options,
        launched=launched,
        origin=origin,
        training=training,
        chunks=chunks,
        engine=engine,
        save_context=save_context,
        copied=cache.report if cache else None,
        loaded=loaded,
        deferred=deferred,
        mesh=mesh,
        base_nbytes=base_nbytes,
        planned_nbytes=planned_nbytes,
    )


def _run_self_check(
    family: Family, launched: Packed, options: TrainOptions, timetable: Timetable, mesh: Mesh, loss: Loss | None
) -> None:
    """Compare a tiny model with one process; every rank calls this, while weights are read."""
    if options.self_check:
        with raise_on_all_ranks("load"):
            if mesh.rank == 0:
                splitting = timetable.name if timetable.splits_backward else None
                self_check(family, launched.stage_modules, RunOptions(compute=options.compute, splitting=splitting))
    has_documents = options.data.document_mask
    # Which architectures can keep documents apart or split rows is not listed: that is always checked.
    if isinstance(family, SelfChecked) and (options.self_check or has_documents or mesh.degrees.context > 1):
        is_of_loss = options.self_check or mesh.degrees.context > 1 or options.loss.entry_point is None
        run = Combination(
            family=family,
            stages=Stages.of(launched),
            timetable=timetable,
            degrees=mesh.degrees,
            options=options,
            has_documents=has_documents,
            # Documents are kept apart whatever the loss is, which may fail there if it is of another package.
            loss=loss if is_of_loss else None,
        )
        plan = options.optim.plan
        assert plan is not None, "made of what the checkpoint stores and the flags"
        classes = (algorithm_of(group, plan.name) for group in plan.groups)
        has_own_optimizer = any("." in name.removeprefix("torch.optim.") for name in classes)
        is_own = sharing_ranks(launched.manifest, options).is_own or has_own_optimizer
        is_kept = not is_own and options.loss.entry_point is None
        prove_once(run, launched.config, options.log_dir, is_kept=is_kept)
    elif options.self_check and mesh.rank == 0:
        logger.info("note: %s is not self-checked: its family has no tiny model to compare", family.architecture)


def _resume_optimizer(
    start: Start,
    training: TrainingState,
    stored: StageLoader,
    engine: Engine,
    chunks: Sequence[StageChunk],
    mesh: Mesh,
    device: torch.device,
) -> Start:
    """Load the optimizer state and the RNG state; return `start` with a note where there is no RNG state."""
    ties = [tie for tie in engine.ties if engine.optimizer.steps(tie.leader)]
    assert training.optimizer is not None
    optimizer, present = engine.optimizer, [kind.name for kind in kinds_of(training.optimizer)]
    for kind in kinds_of(optimizer.plan):
        if kind.name == EMA and EMA not in present:
            continue  # it starts with the weights
        stored.load([piece for chunk in chunks for piece in optimizer.state_pieces(chunk, kind)], kind.name)
        with stored.deferred.comes_first():
            check_equal(ties, of=partial(optimizer.tied_state, kind=kind))
    num_ranks = mesh.degrees.world_size
    with raise_on_all_ranks("load"):
        is_restored = restore_rng(training.random, mesh.rank, num_ranks, device, mesh.degrees.tensor)
    if is_restored:
        return start
    ranks = f"{num_ranks} {device.type.upper()} {'rank' if num_ranks == 1 else 'ranks'}"
    note = f"the checkpoint has no RNG state for {ranks}; reseeding from --seed"
    return replace(start, notes=(*start.notes, note))


def _plan_memory(
    launched: Packed, options: TrainOptions, timetable: Timetable, mesh: Mesh, world: World, device: torch.device
) -> int:
    """Return this rank's planned memory, and set up the heap for it; see Note [Host memory] in heap.py."""
    table = timetable.planned(part_of(options.batch, mesh.degrees).num_microbatches)
    modules, degrees, is_cuda = launched.stage_modules, mesh.degrees, device.type == "cuda"
    host_memory: HostMemory | None = None if is_cuda else "compact"
    config = launched.config
    estimate = planned_memory(launched.shape, modules, table, options, degrees, host_memory=host_memory, config=config)
    memory = estimate.ranks[mesh.pipeline_rank]
    if is_cuda:
        return memory.total
    planned_nbytes, line = set_up_heap(
        options.host_memory,
        memory,
        world.local_size,
        is_sharded=degrees.per_replica > 1,
        is_gathered=is_sharded(mesh.degrees, options.compute),
    )
    if mesh.rank == 0:
        logger.info("%s", line)
    return planned_nbytes


def _log_loaded(report: LoadReport, chunks: Sequence[StageChunk], mesh: Mesh) -> None:
    stages = ", ".join(str(chunk.stage) for chunk in chunks)
    logger.info(
        "[rank %d stage %s] loaded %d tensors, %s in %.2f s, %s/s%s",
        mesh.rank, stages, report.num_tensors, show_bytes(report.nbytes), report.load_s,
        show_bytes(int(report.nbytes / report.load_s)),
        f"; read {show_bytes(report.verified_nbytes)} to verify parts" if report.verified_nbytes else "",
    )  # fmt: skip
    if report.num_unverified:
        logger.warning(
            "[rank %d stage %s] warning: %d tensors of virtual bundles have no digest: size, mtime and header of their "
            "files were checked, their bytes were not verified",
            mesh.rank, stages, report.num_unverified,
        )  # fmt: skip
