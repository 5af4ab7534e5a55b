"""Memory for weights in huge pages: with small pages, page faults take longer than reading the weights."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch.distributed.tensor import DTensor

__all__ = ["empty_like", "return_freed_memory"]

_M_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h
_LEAST_NBYTES = 4 << 20  # smaller tensors would leave huge pages mostly empty
_LEAST_FREED_NBYTES = 256 << 10  # smaller blocks stay in the heap, where most of them are reused


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return uninitialized memory on `device` of this shape and dtype; large CPU tensors are in huge pages."""
    if device.type != "cpu" or isinstance(tensor, DTensor) or tensor.nbytes < _LEAST_NBYTES:
        return torch.empty_like(tensor, device=device)
    # The tensor keeps the mapping alive, and frees it.
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)


def return_freed_memory() -> None:
    """Make malloc return every large block to the system as soon as it is freed.

    glibc raises its threshold for that to 32 MiB as blocks are freed, and keeps freed gradients and activations in a
    fragmented heap: four ranks that shard 1 GB of weights used up to 1.56 times the planned memory. The price is seven
    times as many page faults: four steps of a Llama of width 512 on two ranks, and their start, took 56 s of processor
    time instead of 43. A threshold of 2 MiB, with 64 MiB kept at the heap's end, has a fourth of those faults, but has
    peaks of up to 1.25 times the plan.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LEAST_FREED_NBYTES)
    except AttributeError:  # a libc without this threshold
        return
