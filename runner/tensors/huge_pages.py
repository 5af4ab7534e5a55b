"""Memory for weights in huge pages: with small pages, page faults take longer than reading the weights."""

from __future__ import annotations

import mmap

import torch
from torch.distributed.tensor import DTensor

_LEAST_NBYTES = 4 << 20  # smaller tensors would leave huge pages mostly empty


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return uninitialized memory on `device` of this shape and dtype; large CPU tensors are in huge pages."""
    if device.type != "cpu" or isinstance(tensor, DTensor) or tensor.nbytes < _LEAST_NBYTES:
        return torch.empty_like(tensor, device=device)
    # The tensor keeps the mapping alive, and frees it.
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
