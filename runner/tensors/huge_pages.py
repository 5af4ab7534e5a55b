"""Memory for weights, taken in huge pages: page by page, faults take longer than reading the weights."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch.distributed.tensor import DTensor

__all__ = ["empty_like", "return_freed_memory"]

_M_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h
_LEAST_NBYTES = 4 << 20  # below this a huge page would be mostly empty
_LEAST_FREED_NBYTES = 256 << 10  # smaller blocks stay in the heap, where most of them are used again


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Give memory on `device` for a tensor of this shape and dtype; large ones on the CPU in huge pages."""
    if device.type != "cpu" or isinstance(tensor, DTensor) or tensor.nbytes < _LEAST_NBYTES:
        return torch.empty_like(tensor, device=device)
    # The tensor keeps the mapping alive, and the mapping goes with it.
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)


def return_freed_memory() -> None:
    """Let every large block that is freed from here on go back to the system at once.

    glibc raises its limit for that to 32 MiB as blocks come and go, and keeps freed gradients and activations in a
    heap full of holes: ranks that shared 1 GB of weights by four held up to 1.56 times what was planned.
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LEAST_FREED_NBYTES)
    except AttributeError:  # another libc, which has no such limit
        return
