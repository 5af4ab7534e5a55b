"""Peak memory of a process, and the peak FLOP/s of its GPU, from which MFU is computed."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

from manifests.models import ModelShape
from runner.config.flags import TrainOptions

# Dense bfloat16 matmul, in FLOP/s. The first that a GPU's name has as a word counts.
# Source: the vendors' data sheets, as torchtitan 0.3.0 quotes them in tools/utils.py, `get_peak_flops`.
BF16_FLOPS: Mapping[str, float] = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "GB200": 2.5e15,
    "GB300": 2.5e15,
    "B200": 2.25e15,
    "B300": 2.25e15,
    "MI250X": 191.5e12,
    "MI300X": 1300e12,
    "MI325X": 1300e12,
    "MI355X": 2500e12,
}
# With one of these words as well, a GPU has a part of a chip, or less than the one of that name: its peak is not known.
_UNKNOWN = ("MIG", "H200 NVL")


def peak_flops(device_name: str) -> float | None:
    """Return the peak bfloat16 FLOP/s of a GPU; None where it is not known."""

    def is_named(name: str) -> bool:
        return re.search(rf"\b{name}\b", device_name) is not None

    if any(map(is_named, _UNKNOWN)):
        return None
    return next((flops for name, flops in BF16_FLOPS.items() if is_named(name)), None)


def least_step_s(shape: ModelShape, options: TrainOptions, num_gpus: int, device: torch.device) -> float | None:
    """Return the seconds of a step's matmuls at the data-sheet FLOP/s of all GPUs.

    None: not known, as for a run that freezes weights: their gradients are not computed.
    """
    if device.type != "cuda" or options.compute.dtype != "bf16" or options.lora is not None or options.train_only:
        return None
    flops, batch = peak_flops(torch.cuda.get_device_name(device)), options.batch
    step_flops = shape.train_flops(batch.seq_len) * batch.global_batch * batch.seq_len
    return step_flops / (flops * num_gpus) if flops else None


def memory_nbytes(device: torch.device) -> int:
    """Return the memory of this process: allocated by torch on its GPU, or on the host."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_memory_nbytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated by torch on its GPU, or on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
