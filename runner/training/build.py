"""Build one rank's stages and its engine: the same functions for a run and for its self-check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from manifests.placement import Placement
from manifests.schema import TieGroup
from runner.bundle.packed import Packed
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import REPLICATE, is_sharded
from runner.config.schema import BatchOptions, ComputeOptions
from runner.config.trained import Trains
from runner.distributed.fail_together import from_rank_0, raise_on_all_ranks
from runner.distributed.world import connect
from runner.models.family import Family, OnTransformers
from runner.parallel.mesh import Mesh
from runner.parallel.parallelize import Parallel, keep_documents, parallelize, share_matrices
from runner.pipeline.chunk import StageChunk, build_chunks, cast, materialize
from runner.pipeline.heads import loss_with_mtp
from runner.pipeline.losses import Loss
from runner.pipeline.schedule import build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import Timetable
from runner.profiling.trace import Clock
from runner.tensors.local_shard import FLAG_DTYPES
from runner.training.activation_checkpoint import apply_compute_options
from runner.training.expert_balance import balance_experts
from runner.training.gradient_norm import StepTotals
from runner.training.mixed_precision import keep_as_stored, keep_masters
from runner.training.optimizer import Optimizer
from runner.training.step import Engine
from runner.training.ties import Tie, build_ties, follow_leaders, lead_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The stages of a pipeline: the modules of each, the ranks that they are on, and the ties between them."""

    modules: tuple[tuple[str, ...], ...]
    placement: Placement
    ties: tuple[TieGroup, ...]

    @classmethod
    def of(cls, packed: Packed) -> Stages:
        """Return the stages of a manifest."""
        return cls(modules=packed.stage_modules, placement=packed.manifest.placement, ties=packed.manifest.ties)


def apply_model_options(family: Family, options: TrainOptions) -> None:
    """Let a family build modules with a run's adapters, the weight of MTP layers, and documents that are kept apart."""
    if options.lora is not None:
        assert isinstance(family, OnTransformers), "refused before"
        family.add_adapters(options.lora, checks_names=options.adapter is None)
    if isinstance(family, OnTransformers):
        family.mtp_weight = options.loss.mtp_weight
    if options.data.document_mask:
        keep_documents(family, options.batch.seq_len)


def build_stages(
    family: Family,
    stages: Stages,
    compute: ComputeOptions,
    mesh: Mesh,
    device: torch.device,
    trains: Trains | None,
    stored: Mapping[str, torch.dtype] | None = None,
) -> tuple[StageChunk, ...]:
    """Build this rank's stages, and no others, and allocate their memory. What is trained is decided here.

    Frozen weights and buffers are saved in the dtypes that files have, `stored` by FQN: see Note [Frozen weights].
    """
    chunks = build_chunks(family, stages.modules, stages.placement.stages_on(mesh.pipeline_rank))
    is_fsdp = is_sharded(mesh.degrees, compute)
    compute_dtype = FLAG_DTYPES[compute.dtype]
    dtype = FLAG_DTYPES[compute.master_dtype] if is_fsdp else compute_dtype
    for chunk in chunks:
        if trains is not None:
            chunk.freeze(trains)
        of_files = chunk.frozen_dtypes(stored or {})
        if is_fsdp:
            chunk.dtypes = {name: of_file for name, of_file in of_files.items() if of_file != compute_dtype}
        cast(chunk, dtype, compute_dtype)
        parallelize(chunk, mesh, compute)
        materialize(chunk, device=device, dtype=dtype, compute_dtype=compute_dtype)
        if not is_fsdp:
            keep_as_stored(chunk.body, of_files)
        keep_as_stored(chunk.body, chunk.buffer_dtypes(stored or {}))
    if compute.has_masters and not is_fsdp:
        frozen = set[int]().union(*(chunk.frozen_ids() for chunk in chunks))
        keep_masters(chunks, FLAG_DTYPES[compute.master_dtype], frozen)
    return chunks


def build_engine(
    stages: Stages,
    chunks: Sequence[StageChunk],
    options: TrainOptions,
    timetable: Timetable,
    mesh: Mesh,
    batch: BatchOptions,
    loss: Loss | None = None,
) -> Engine:
    """Tie, schedule and optimize the loaded stages; this creates process groups. `batch` is one pipeline's share."""
    chunks, placement, compute, family = tuple(chunks), stages.placement, options.compute, chunks[0].family
    timetable = from_rank_0(timetable)  # a schedule file of that name may differ on another machine
    share = partial(share_matrices, mesh=mesh)
    metadata = plan_stage_metadata(family, stages.modules, FLAG_DTYPES[compute.dtype], share)
    groups = ties_of(family, stages)
    ties = build_ties(groups, chunks, placement, timedelta(seconds=options.timeout_s), mesh.pipelines)
    parameters = lead_parameters(chunks, ties)
    follow_leaders(ties)  # what is borrowed was not loaded
    _connect(mesh, ties, chunks[0].device)
    with raise_on_all_ranks("compute"):
        apply_compute_options(chunks, placement.num_stages, compute)
    reduce_dtype, dtype = FLAG_DTYPES[compute.reduce_dtype], FLAG_DTYPES[compute.master_dtype]
    parallel = Parallel(mesh=mesh, chunks=chunks, reduce_dtype=reduce_dtype, dtype=dtype)
    parallel.reshard()
    guard = partial(raise_on_all_ranks, "optimizer")
    optimizer = Optimizer(parameters, options.optim, chunks, mesh, [names_of(group) for group in groups], guard)
    with raise_on_all_ranks("experts"):
        balance = balance_experts(chunks, options.balance, batch, mesh, is_compiled=compute.is_compiled)
    table, is_cuda = timetable.planned(batch.num_microbatches), chunks[0].device.type == "cuda"
    clock = Clock(table, mesh.pipeline_rank, options.traced, is_cuda=is_cuda)
    mtp_loss = loss_with_mtp(chunks)
    return Engine(
        schedule=build_schedule(timetable, chunks, metadata, batch, mesh.pipeline, mtp_loss or loss),
        loss=loss,
        mtp_loss=mtp_loss,
        ties=ties,
        totals=StepTotals(
            parameters, ties, device=chunks[0].device, mesh=mesh, num_times=clock.num_times, counts=optimizer.is_clipped
        ),
        optimizer=optimizer,
        parallel=parallel if mesh.degrees.per_stage > 1 else None,
        clock=clock,
        balance=balance,
    )


def _connect(mesh: Mesh, ties: Sequence[Tie], device: torch.device) -> None:
    """Connect the groups that a step uses first when its schedule has ended: then torch keeps all memory of the GPU."""
    meshes = (mesh.device_mesh, mesh.sparse_mesh) if mesh.degrees.replicate > 1 else ()
    replicas = (part.get_group(REPLICATE) for part in meshes if part is not None)
    pipeline = mesh.pipeline or dist.group.WORLD
    for group in filter(None, (mesh.stage, pipeline, *replicas, *(tie.group for tie in ties))):
        connect(group, device)


def ties_of(family: Family, stages: Stages) -> tuple[TieGroup, ...]:
    """Return what is tied: what files say, and MTP layers with the model."""
    more = family.mtp_ties(stages.modules) if isinstance(family, OnTransformers) else ()
    return (*stages.ties, *more)


def names_of(group: TieGroup) -> tuple[str, ...]:
    return tuple(member.fqn for member in group.members)
