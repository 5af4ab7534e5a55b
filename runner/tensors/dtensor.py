"""What of a parameter lies on this rank, where torch shards it over a device mesh."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["local_of", "local_offset", "mesh_dims", "sharded_dims"]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Give this rank's part of a tensor, in the same memory; of one that is not sharded, all of it."""
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor._local_tensor
        return local
    return tensor


def local_offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Give where this rank's part of a tensor begins."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape) == tuple(local_of(tensor).shape), "the parts of a parameter are boxes"
    return tuple(offset)


def mesh_dims(tensor: torch.Tensor) -> tuple[str, ...]:
    """Give the names of the mesh's dimensions that torch keeps a tensor in step over."""
    return tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()


def sharded_dims(tensor: torch.Tensor) -> frozenset[str]:
    """Give those of `mesh_dims` over which its parts differ."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    placed = zip(mesh_dims(tensor), tensor.placements, strict=True)
    # A part of a part is no `Shard` for torch: see `_StridedShard`.
    return frozenset(name for name, where in placed if not where.is_replicate())
