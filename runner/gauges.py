"""What a run is held against: memory at its peak, and how fast its GPUs could be."""

from __future__ import annotations

import resource
from collections.abc import Mapping

import torch

from manifests.models import ModelShape
from runner.options import TrainOptions

__all__ = ["BF16_FLOPS", "least_step_s", "peak_flops", "peak_memory_nbytes"]

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


def peak_memory_nbytes(device: torch.device) -> int:
    """Give the most memory that this process has had: of its GPU, as torch gave it out, or of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
