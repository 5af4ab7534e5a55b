"""What a run is held against: memory at its peak, and how fast its GPUs could be."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from manifests.memory import DtypePolicy, MemoryEstimate, Training, estimate_memory
from manifests.models import ModelShape
from manifests.schedules import Table
from runner.config.flags import TrainOptions
from runner.config.parallel_dims import Degrees
from runner.config.schema import ComputeOptions

__all__ = [
    "BF16_FLOPS",
    "least_step_s",
    "memory_nbytes",
    "peak_flops",
    "peak_memory_nbytes",
    "planned_memory",
]

# Products of bfloat16 matrices, dense, in FLOP/s. The first name that is part of a GPU's own counts.
# Source: the vendors' data sheets, as torchtitan 0.3.0 quotes them in tools/utils.py, `get_peak_flops`.
BF16_FLOPS: Mapping[str, float] = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GB200": 2.5e15,
    "GB300": 2.5e15,
    "B200": 2.25e15,
    "B300": 2.25e15,
    "MI250X": 191.5e12,
    "MI300X": 1300e12,
    "MI325X": 1300e12,
    "MI355X": 2500e12,
}


def peak_flops(device_name: str) -> float | None:
    """Give the FLOP/s of a GPU for products in bfloat16; None where it is not known."""
    return next((flops for name, flops in BF16_FLOPS.items() if name in device_name), None)


def least_step_s(shape: ModelShape, options: TrainOptions, num_gpus: int, device: torch.device) -> float | None:
    """Give how long a step's products would take if all GPUs were as fast as their data sheet; None: not known."""
    if device.type != "cuda" or options.compute.dtype != "bf16":
        return None
    flops, batch = peak_flops(torch.cuda.get_device_name(device)), options.batch
    step_flops = shape.train_flops(batch.seq_len) * batch.global_batch * batch.seq_len
    return step_flops / (flops * num_gpus) if flops else None


def memory_nbytes(device: torch.device) -> int:
    """Give the memory that this process has now: of its GPU, as torch gave it out, or of the host."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_memory_nbytes(device: torch.device) -> int:
    """Give the most memory that this process has had: of its GPU, as torch gave it out, or of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def planned_memory(
    shape: ModelShape, stages: Sequence[Sequence[str]], table: Table, options: TrainOptions, degrees: Degrees
) -> MemoryEstimate | None:
    """Give what `reshard plan` says of a run's memory; None where it tells nothing of what the run does.

    That is where ranks share a stage's memory or its matrices, and where activations are not all kept.
    """
    compute = options.compute
    if degrees.shard > 1 or degrees.tensor > 1 or compute.recompute != "none" or compute.loss_chunk is not None:
        return None
    training = Training(policy=_policy(compute), microbatch=options.batch.microbatch, seq_len=options.batch.seq_len)
    return estimate_memory(shape, stages, table, training)


def _policy(compute: ComputeOptions) -> DtypePolicy:
    own, master = _NBYTES[compute.dtype], _NBYTES[compute.master_dtype]
    kept = 3 * master if compute.has_masters else 2 * master  # two moments, and the master
    return DtypePolicy(name=compute.dtype, weights=own, gradients=master, optimizer=kept, compute=own)


_NBYTES = {"fp32": 4, "bf16": 2}
