"""A rank that trains jobs one after the other, as `runner.train` does, and saves what came of each.

usage: job_worker.py JOBS cpu|cuda

JOBS is a JSON list of `tests.gpu.jobs.Job`. All ranks share the first GPU, unless there is one for each.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from runner.bundle.packed import open_packed
from runner.checkpoint.resume import Origin
from runner.config.flags import parse_training
from runner.config.memory import planned_memory
from runner.distributed.world import World, join_world
from runner.metrics.gauges import peak_memory_nbytes
from runner.pipeline.chunk import hf_pieces
from runner.setup import Ready, begin
from runner.training.mixed_precision import master_of
from runner.training.step import train_step
from tests.fast.runner.tiny import padded_batch
from tests.gpu.through_host import exchange_through_host


def run_job(job: Mapping[str, Any], world: World, device: torch.device) -> dict[str, Any]:
    gc.collect()  # what the job before has left
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    launched, options = open_packed(Path(job["packed"])), parse_training(job["flags"])
    ready = begin(launched, (Origin(folder=launched.root),), options, world, device)
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    sizes = options.batch
    for step in range(options.steps):
        batch = padded_batch(step, size=sizes.global_batch, seq_len=sizes.seq_len, vocab_size=job["vocab_size"])
        ready.engine.clock.note_data(0.0)
        report = train_step(ready.engine, batch, step)
        found["losses"].append(report.loss)
        found["norms"].append(report.grad_norm)
        if step == 0:
            pieces = (piece for chunk in ready.chunks for piece in hf_pieces(chunk, lambda weight: weight.grad))
            found["gradients"] = {piece.fqn: piece.memory.to("cpu", torch.float32, copy=True) for piece in pieces}
    return found | memory_of(ready, device)


def memory_of(ready: Ready, device: torch.device) -> dict[str, Any]:
    """Return the bytes that this rank has, had at most and should have, and whether its AdamW is fused."""
    parameters = [parameter for chunk in ready.chunks for parameter in chunk.parameters()]
    (adamw,) = ready.engine.optimizer.torch_optimizers
    masters = [master_of(parameter) for parameter in parameters if master_of(parameter) is not parameter]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    moments = [tensor for state in adamw.state.values() for tensor in state.values() if tensor.dim()]
    degrees, stages = ready.mesh.degrees, ready.launched.stage_modules
    planned = planned_memory(ready.launched.shape, stages, ready.engine.clock.table, ready.options, degrees)
    own = planned.ranks[ready.mesh.pipeline_rank]
    return {
        "fused": adamw.param_groups[0]["fused"],
        "held_nbytes": nbytes_of([*parameters, *masters, *gradients, *moments]),
        "peak_nbytes": peak_memory_nbytes(device),
        "planned_nbytes": own.total,
        "planned_to_hold_nbytes": own.state,
    }


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all storages, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def main(jobs: Path, kind: str) -> None:
    world = World.from_environment(os.environ)
    shares_device = world.size > 1 and (kind == "cpu" or torch.cuda.device_count() < world.size)
    device = torch.device("cuda", 0 if shares_device else world.local_rank) if kind == "cuda" else torch.device("cpu")
    if shares_device:
        exchange_through_host()
    join_world(device, timeout_s=120, shares_gpu=shares_device)
    for job in json.loads(jobs.read_text()):
        torch.save(run_job(job, world, device), f"{job['out']}-{world.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
