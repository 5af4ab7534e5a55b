"""Which part of a parameter is on this rank, if torch shards it over a device mesh."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["local_of", "local_offset", "mesh_dims", "sharded_dims", "whole_of"]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, sharing its memory; any other tensor as it is."""
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor._local_tensor
        return local
    return tensor


def local_offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the offset of this rank's part of a tensor in each dimension."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape) == tuple(local_of(tensor).shape), "the parts of a parameter are regions"
    return tuple(offset)


def mesh_dims(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the mesh dimensions that a tensor is distributed over."""
    return tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()


def sharded_dims(tensor: torch.Tensor) -> frozenset[str]:
    """Return those of `mesh_dims` over which a tensor is sharded, not replicated."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    placed = zip(mesh_dims(tensor), tensor.placements, strict=True)
    # torch places a shard of a shard as `_StridedShard`, which is not a `Shard`.
    return frozenset(name for name, where in placed if not where.is_replicate())


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's whole tensor, gathered from the ranks of its mesh, which all call this; others as they are."""
    if isinstance(tensor, DTensor):
        whole: torch.Tensor = tensor.full_tensor()
        return whole
    return tensor
