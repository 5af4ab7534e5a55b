"""Where the tensors of files are in parameters that transformers builds of several of them.

transformers says how to turn parameters back into the tensors of files, as operations on tensors. Applied to an empty
parameter they say which region of it each tensor of a file is; anything but a region is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from runner.tensors.local_shard import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A tensor of a file as a part of a parameter.

    Shapes: `shape` is the tensor's; `corner` and `sizes` are of the parameter's dimensions, of which `dims` are the
    tensor's, in its order. The others have size 1.
    """

    fqn: str
    shape: tuple[int, ...]
    corner: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: tuple[int, ...]


@contextmanager
def keeping_views() -> Iterator[None]:
    """Let operations on tensors return views where they would copy, so that a result says where it came from."""
    # Defined by a base class: it comes back when this attribute is gone.
    torch.Tensor.contiguous = lambda tensor, **_: tensor  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.Tensor.contiguous


def regions_of(parameter: torch.Tensor, files: Mapping[str, torch.Tensor]) -> tuple[Region, ...] | None:
    """Return the regions that views of a parameter are; None if one is something else, or some of it is in none.

    Shapes: `parameter` is contiguous, of any shape.
    """
    whole = parameter.untyped_storage()
    regions = []
    for fqn, tensor in files.items():
        region = _region(fqn, tensor, parameter) if tensor.untyped_storage()._cdata == whole._cdata else None
        if region is None:
            return None
        regions.append(region)
    if sum(tensor.numel() for tensor in files.values()) != parameter.numel():
        return None
    return tuple(regions)


def _region(fqn: str, tensor: torch.Tensor, parameter: torch.Tensor) -> Region | None:
    rest, corner = tensor.storage_offset() - parameter.storage_offset(), []
    for stride in parameter.stride():
        corner.append(rest // stride if stride else 0)
        rest -= corner[-1] * stride
    sizes, dims = [1] * parameter.dim(), []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        fitting = [
            dim
            for dim, (whole, step) in enumerate(zip(parameter.shape, parameter.stride(), strict=True))
            if step == stride and dim not in dims and corner[dim] + size <= whole
        ]
        if not fitting:
            return None
        # Of dimensions with equal strides all but one have size 1.
        dim = max(fitting, key=lambda dim: parameter.shape[dim])
        dims.append(dim)
        sizes[dim] = size
    return Region(fqn=fqn, shape=tuple(tensor.shape), corner=tuple(corner), sizes=tuple(sizes), dims=tuple(dims))


def pieces_in(region: Region, memory: torch.Tensor, offset: tuple[int, ...]) -> Piece | None:
    """Return the part of a file's tensor that is in `memory`, a box of the parameter that begins at `offset`.

    Shapes: `memory` has the dimensions of the parameter; the piece those of the file's tensor.
    """
    begins = [max(corner, low) for corner, low in zip(region.corner, offset, strict=True)]
    ends = [
        min(corner + size, low + length)
        for corner, size, low, length in zip(region.corner, region.sizes, offset, memory.shape, strict=True)
    ]
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return None
    cut: Any = tuple(slice(begin - low, end - low) for begin, end, low in zip(begins, ends, offset, strict=True))
    box = memory[cut]
    dropped = [dim for dim in range(box.dim()) if dim not in region.dims]
    box = box.permute((*region.dims, *dropped))
    for _ in dropped:
        box = box.squeeze(-1)
    corner = tuple(begins[dim] - region.corner[dim] for dim in region.dims)
    return Piece(fqn=region.fqn, shape=region.shape, offset=corner, memory=box)
