"""Which part of a parameter is on this rank, if torch shards it over a device mesh."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


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


def local_regions(tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, tuple[int, ...]], ...]:
    """Return this rank's regions of a tensor, each with its offset: of matrices packed into one, a region of each."""
    if not isinstance(tensor, DTensor) or (packed := packed_dim(tensor)) is None:
        return ((local_of(tensor), local_offset(tensor)),)
    (dim, count), at = packed, len(tensor.placements) - 1
    others = [Replicate() if index == at else place for index, place in enumerate(tensor.placements)]
    offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, others)[1]
    rows = tensor.shape[dim] // count  # of each matrix
    first = -(-rows // tensor.device_mesh.size(at)) * tensor.device_mesh.get_local_rank(at)  # as `chunk` splits them
    return tuple(
        (part, (*offset[:dim], index * rows + first, *offset[dim + 1 :]))
        for index, part in enumerate(local_of(tensor).chunk(count, dim))
    )


def packed_dim(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the dimension in which matrices are packed, each of them sharded, and how many they are.

    torch places a tensor-parallel rank's rows of them as `_StridedShard`, over the last dimension of the mesh; over
    another that is a shard of a shard.
    """
    where = tensor.placements[-1] if isinstance(tensor, DTensor) else None
    return (where.dim % tensor.dim(), int(where.split_factor)) if isinstance(where, _StridedShard) else None


def in_one_region(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which each rank has one region: the ranks of its mesh exchange rows of packed matrices.

    All of them call this. Other tensors are returned as they are.
    """
    if not isinstance(tensor, DTensor) or (packed := packed_dim(tensor)) is None:
        return tensor
    return tensor.redistribute(placements=[*tensor.placements[:-1], Shard(packed[0])])


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
