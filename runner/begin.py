"""A run made ready: stages built, filled from a checkpoint, tied and scheduled. Every rank does this."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from manifests.errors import InputError
from manifests.schema import MOMENTS, TrainingState
from runner.chunk import StageChunk, build_chunks, hf_pieces, materialize
from runner.families import family_for
from runner.held import Held, held_state, held_weights
from runner.load import LoadReport, load_tensors
from runner.norm import StepTotals
from runner.optim import Optimizer
from runner.options import TrainOptions, recall
from runner.packed import Packed, open_packed
from runner.randomness import restore_random
from runner.recipe import check_schedule, default_schedule
from runner.resume import check_fits, differences, goes_on_from, remembered
from runner.save import Job, parent_of
from runner.schedule import build_schedule
from runner.step import Engine
from runner.ties import build_ties, check_equal, check_loaded, lead_parameters
from runner.together import together
from runner.wire import plan_wire
from runner.world import World
from stores.bundles import Bundles

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

    @property
    def job(self) -> Job:
        parents = (*self.origin.manifest.parents, parent_of(self.origin.root))
        return Job(manifest=self.launched.manifest, root=self.launched.root, parents=parents)

    def held_state(self) -> Held:
        """Give this rank's weights and moments, as a checkpoint stores them."""
        return held_state(self.chunks, self.launched.manifest.ties, self.engine.ties, self.engine.optimizer)

    def held_weights(self) -> Held:
        return held_weights(self.chunks, self.launched.manifest.ties)


def begin(
    launched: Packed, folders: Sequence[Path], options: TrainOptions, world: World, device: torch.device
) -> Ready:
    """Make a run ready from the first of these folders that can be read; `folders` are the same on all ranks.

    Raises:
        UserError: on all ranks alike, as for the first folder.
    """
    first: InputError | None = None
    for folder in folders:
        try:
            return _begin(launched, folder, options, world, device)
        except InputError as error:
            first = first or error
            if world.rank == 0 and len(folders) > 1:
                logger.warning("warning: %s cannot be resumed: %s", folder, error)
    assert first is not None, "there is always a manifest to begin with"
    raise first


def _begin(launched: Packed, folder: Path, options: TrainOptions, world: World, device: torch.device) -> Ready:
    with together("load"):
        origin = launched if folder == launched.root else open_packed(folder)
        said = check_fits(origin, launched)
        training = goes_on_from(origin, options.resume, is_launched=folder == launched.root)
        if training is not None:
            said += differences(options, training)
            options = recall(options, remembered(training))
        bundles = Bundles(origin.manifest, origin.root)
        chunks = _build(launched, options, world, device)
        weights = {piece.fqn: piece.memory for chunk in chunks for piece in hf_pieces(chunk)}
        report = load_tensors(weights, bundles, origin.shape)
        check_loaded(launched.manifest.ties, chunks)
    _say_loaded(report, chunks, world)
    engine = _build_engine(launched, chunks, options, device)
    check_equal(engine.ties)
    if training is not None:
        _resume(engine, bundles, origin, training)
        with together("load"):
            is_restored = restore_random(training.random, world.rank, world.size, device)
        if not is_restored:
            said += (f"no random states of {world.size} ranks on {device.type} were saved: they begin anew",)
    if world.rank == 0:
        _say_begun(origin, training, said)
    return Ready(options=options, launched=launched, origin=origin, training=training, chunks=chunks, engine=engine)


def _build(launched: Packed, options: TrainOptions, world: World, device: torch.device) -> tuple[StageChunk, ...]:
    """Build this rank's stages, and no others, and give them memory."""
    family = family_for(launched.config, max_seq_len=options.batch.seq_len)
    chunks = build_chunks(family, launched.stage_modules, launched.manifest.placement.stages_on(world.rank))
    for chunk in chunks:
        materialize(chunk, device=device, dtype=_DTYPES[options.dtype])
    return chunks


def _build_engine(
    launched: Packed, chunks: tuple[StageChunk, ...], options: TrainOptions, device: torch.device
) -> Engine:
    """Tie, schedule and optimize what was loaded; this creates process groups."""
    placement = launched.manifest.placement
    name = options.schedule or launched.manifest.layout.schedule or default_schedule(placement)
    schedule = check_schedule(name, placement, options.batch.num_microbatches)
    wire = plan_wire(chunks[0].family, launched.stage_modules, _DTYPES[options.dtype])
    ties = build_ties(launched.manifest.ties, chunks, placement, timedelta(seconds=options.timeout_s))
    parameters = lead_parameters(chunks, ties)
    return Engine(
        schedule=build_schedule(schedule, chunks, wire, placement, options.batch),
        ties=ties,
        totals=StepTotals(parameters, ties, device=device),
        optimizer=Optimizer(parameters, options.optim),
    )


def _resume(engine: Engine, bundles: Bundles, origin: Packed, training: TrainingState) -> None:
    """Fill the moments of what this rank steps, and go on counting."""
    optimizer = engine.optimizer
    with together("load"):
        for holds in MOMENTS:
            moments = {fqn: optimizer.moment(parameter, holds) for fqn, parameter in optimizer.parameters}
            load_tensors(moments, bundles, origin.shape, holds)
    for holds in MOMENTS:
        check_equal(engine.ties, of=partial(optimizer.moment, moment=holds))
    optimizer.resume(training.step)


def _say_loaded(report: LoadReport, chunks: Sequence[StageChunk], world: World) -> None:
    stages = ", ".join(str(chunk.stage) for chunk in chunks)
    logger.info(
        "[rank %d stage %s] loaded %d tensors, %.2f GiB in %.2f s",
        world.rank, stages, report.num_tensors, report.nbytes / 2**30, report.load_s,
    )  # fmt: skip


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
