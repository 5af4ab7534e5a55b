"""Memory for weights, taken in huge pages: page by page, faults take longer than reading the weights."""

from __future__ import annotations

import mmap

import torch
from torch.distributed.tensor import DTensor

__all__ = ["empty_like"]

_LEAST_NBYTES = 4 << 20  # below this a huge page would be mostly empty


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Give memory on `device` for a tensor of this shape and dtype; large ones on the CPU in huge pages."""
    if device.type != "cpu" or isinstance(tensor, DTensor) or tensor.nbytes < _LEAST_NBYTES:
        return torch.empty_like(tensor, device=device)
    # The tensor keeps the mapping alive, and the mapping goes with it.
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
