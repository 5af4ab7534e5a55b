"""The memory that a run is planned to use, from its options. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from manifests.errors import UsageError
from manifests.models import ModelShape
from manifests.models.adapters import adapter_sizes
from manifests.models.memory import MemoryEstimate, estimate_memory
from manifests.models.training import DtypePolicy, HostMemory, Training
from manifests.optimizer_groups import known_kinds
from manifests.optimizer_state import EMA, count_state, kinds_of
from manifests.schedules.actions import Table
from runner.config.flags import TrainOptions
from runner.config.optimizers import optimizer_of
from runner.config.parallel_dims import ParallelDims
from runner.config.trained import ties_in_training, trained_by

_NBYTES = {"fp32": 4, "bf16": 2}
_STORED_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def planned_memory(
    shape: ModelShape,
    stages: Sequence[Sequence[str]],
    table: Table,
    options: TrainOptions,
    degrees: ParallelDims,
    *,
    host_memory: HostMemory | None = None,
    config: Mapping[str, Any] | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a run on each stage and pipeline rank; `host_memory` is None on GPUs.

    The model's `config` says the dtype in which frozen weights are kept.
    """
    compute, batch, lora = options.compute, options.batch, options.lora
    sizes = () if lora is None else adapter_sizes(shape, lora.target, lora.rank, has_experts=lora.experts)
    plan, state = options.optim.plan, dict[str, float]()  # the launcher has no plan
    if plan is None and options.optim.optimizer is not None:
        plan = optimizer_of(options.optim, shape)
        with suppress(UsageError):  # a class of another package, whose state is taken for AdamW's until it is tested
            plan = replace(plan, kinds=known_kinds(plan))
    if plan is not None:
        kinds = tuple(kind for kind in kinds_of(plan) if kind.name != EMA)  # which may be wider than other state
        state = count_state(replace(plan, kinds=kinds), shape.tensors, shape.ties)
    stored = (config or {}).get("dtype", (config or {}).get("torch_dtype"))
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
        trains=trained_by(options, ties_in_training(shape)) or (lambda fqn: True),
        adapters=dict(sizes),
        dropout_rank=lora.rank if lora is not None and lora.dropout else 0,
        state_of=lambda fqn: state.get(fqn, 2.0),  # adapters are trained by AdamW
        frozen_nbytes=_STORED_NBYTES.get(str(stored)) if options.train_only else None,
        keeps_average=bool(options.optim.ema),
    )
    return estimate_memory(shape, stages, table, training)
