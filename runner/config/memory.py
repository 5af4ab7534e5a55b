"""A run's memory, as `reshard plan` estimates it. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from manifests.models import ModelShape
from manifests.models.memory import MemoryEstimate, estimate_memory
from manifests.models.training import DtypePolicy, HostMemory, Training
from manifests.schedules import Table
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import ParallelDims

_NBYTES = {"fp32": 4, "bf16": 2}


def planned_memory(
    shape: ModelShape,
    stages: Sequence[Sequence[str]],
    table: Table,
    options: TrainOptions,
    degrees: ParallelDims,
    *,
    host_memory: HostMemory | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a run on each stage and pipeline rank; `host_memory` is None on GPUs."""
    compute, batch = options.compute, options.batch
    training = Training(
        policy=DtypePolicy(
            name=compute.dtype,
            compute=_NBYTES[compute.dtype],
            master=_NBYTES[compute.master_dtype],
            reduce=_NBYTES[compute.reduce_dtype],
        ),
        microbatch=batch.microbatch,
        seq_len=batch.seq_len,
        shard=degrees.shard,
        tensor=degrees.tensor,
        recompute=compute.recompute,
        loss_chunk=compute.loss_chunk,
        host_memory=host_memory,
    )
    return estimate_memory(shape, stages, table, training)
