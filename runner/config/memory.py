"""The memory that a run is planned to use, from its options. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from manifests.models import ModelShape
from manifests.models.adapters import adapter_sizes
from manifests.models.memory import MemoryEstimate, estimate_memory
from manifests.models.training import DtypePolicy, HostMemory, Training
from manifests.optimizer_state import EMA, PRESETS, count_state, preset_for
from manifests.schedules import Table
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import ParallelDims
from runner.config.trained import trained_by

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
    compute, batch, lora = options.compute, options.batch, options.lora
    sizes = () if lora is None else adapter_sizes(shape, lora.target, lora.rank, has_experts=lora.experts)
    plan = options.optim.plan  # the launcher has none
    if plan is None and options.optim.optimizer in PRESETS:
        plan = preset_for(options.optim.optimizer, shape)
    if plan is not None and plan.kinds is not None:  # an average, which may be wider than other state, is added below
        plan = replace(plan, kinds=tuple(kind for kind in plan.kinds if kind.name != EMA))
    state = {} if plan is None else count_state(plan, shape.tensors, shape.ties)
    average = max(1.0, _NBYTES["fp32"] / _NBYTES[compute.master_dtype]) if options.optim.ema else 0.0
    training = Training(
        policy=DtypePolicy(
            name=compute.dtype,
            compute=_NBYTES[compute.dtype],
            master=_NBYTES[compute.master_dtype],
            reduce=_NBYTES[compute.reduce_dtype],
        ),
        microbatch=batch.microbatch,
        seq_len=batch.seq_len,
        shard=degrees.fsdp,
        context=degrees.context,
        exchanges_heads=degrees.context > 1 and options.degrees.context_method == "ulysses",
        keeps_documents=options.data.document_mask,
        tensor=degrees.tensor,
        expert=degrees.expert,
        recompute=compute.recompute,
        loss_chunk=compute.loss_chunk,
        host_memory=host_memory,
        trains=trained_by(options, shape.ties) or (lambda fqn: True),
        adapters=dict(sizes),
        state_of=lambda fqn: state.get(fqn, 2.0) + average,  # adapters are trained by AdamW
    )
    return estimate_memory(shape, stages, table, training)
