"""Open a packed model for inference: each rank reads the weights of its stages, without training state."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from manifests.schedules import default_schedule
from manifests.schema import Manifest
from manifests.store import locate_manifest, read_manifest
from runner.bundle.packed import Packed
from runner.config.schema import BatchOptions, ComputeOptions
from runner.distributed.fail_together import alone, together
from runner.distributed.world import World, device_of, join_world
from runner.evaluation.command import ReadOptions
from runner.launch.local import check_world
from runner.load.load import load_tensors
from runner.models import Family, family_for
from runner.pipeline.chunk import StageChunk, build_chunks, hf_constants, hf_pieces, materialize
from runner.pipeline.schedule import Schedule, build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from runner.rundir.rank_label import set_rank_label, stages_of
from runner.tensors.dtypes import FLAG_DTYPES
from runner.training.self_check import RunOptions, self_check
from runner.training.ties import check_loaded
from stores.bundles import Bundles

logger = logging.getLogger("runner")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadModel:
    """A model of which this rank has some stages."""

    packed: Packed
    chunks: tuple[StageChunk, ...]
    schedule: Schedule  # callers pass their own batch sizes

    @property
    def family(self) -> Family:
        return self.chunks[0].family

    @property
    def vocab_size(self) -> int:
        return self.family.vocab_size

    @property
    def num_ranks(self) -> int:
        return self.packed.manifest.placement.num_ranks

    @property
    def last_rank(self) -> int:
        """The rank with the last stage, which has the logits."""
        placement = self.packed.manifest.placement
        return placement.rank_of(placement.num_stages - 1)


def meet(options: ReadOptions, world: World) -> tuple[Path, Manifest, torch.device]:
    """Meet the other ranks; return the folder of the manifest, the manifest, and this rank's device."""
    with alone(world.rank):
        path = locate_manifest(options.manifest)
        manifest = read_manifest(path)
    check_world(manifest, world.size)
    set_rank_label(world.rank, stages_of(manifest, world.rank, world.size))
    with alone(world.rank):
        device = device_of(world, options.device)
    join_world(device, options.timeout_s)
    return path.parent, manifest, device


def read_model(
    packed: Packed, options: ReadOptions, world: World, device: torch.device, *, max_seq_len: int
) -> ReadModel:
    """Build this rank's stages for sequences of at most `max_seq_len` tokens, and read their weights.

    Raises:
        UserError: on all ranks alike, whichever rank met it.
    """
    dtype = FLAG_DTYPES[options.dtype]
    manifest = packed.manifest
    with together("load"):
        family = family_for(
            packed.config, max_seq_len=max_seq_len, shape=packed.shape, description=manifest.model.description
        )
        if options.self_check and world.rank == 0:
            compute = ComputeOptions(dtype=options.dtype, master_dtype=options.dtype)
            self_check(family, packed.stage_modules, RunOptions(compute=compute))
        chunks = build_chunks(family, packed.stage_modules, manifest.placement.stages_on(world.rank))
        for chunk in chunks:
            materialize(chunk, device=device, dtype=dtype)
        weights = [piece for chunk in chunks for piece in (*hf_pieces(chunk), *hf_constants(chunk))]
        report = load_tensors(weights, Bundles(manifest, packed.root), packed.shape, num_ranks=world.local_size)
        check_loaded(manifest.ties, chunks)
    if world.rank == 0:
        for name in packed.unnamed:
            logger.warning("warning: %s is not listed in %s, so it is not verified", name, packed.where)
        if report.num_unverified:
            logger.warning(
                "warning: tensors of virtual bundles have no digests: size, mtime and header of their files were "
                "checked, their bytes were not verified"
            )
    placement = manifest.placement
    whole = BatchOptions(global_batch=2 * placement.num_stages, microbatch=1, seq_len=max_seq_len)
    timetable = find_timetable(default_schedule(placement), placement, whole.num_microbatches)
    schedule = build_schedule(timetable, chunks, plan_stage_metadata(family, packed.stage_modules, dtype), whole)
    return ReadModel(packed=packed, chunks=chunks, schedule=schedule)
