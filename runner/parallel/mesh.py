"""The device meshes: this rank's coordinates in the parallel dimensions, and the process groups of each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from runner.config.parallel_dims import (
    CONTEXT,
    EXPERT,
    EXPERT_FSDP,
    FSDP,
    PIPELINE,
    REPLICATE,
    SHARD,
    TENSOR,
    ParallelDims,
)
from runner.tensors.dtensor import mesh_dims, sharded_dims

_DENSE = (PIPELINE, REPLICATE, FSDP, TENSOR)
_SPARSE = (PIPELINE, REPLICATE, EXPERT_FSDP, EXPERT)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mesh:
    """One rank's coordinates. If each stage has one rank, there is no device mesh: all ranks are one pipeline.

    See Note [Two meshes] in parallel_dims.py.
    """

    degrees: ParallelDims
    rank: int
    device_mesh: DeviceMesh | None = None  # the dense one
    sparse_mesh: DeviceMesh | None = None  # with expert parallelism
    context_mesh: DeviceMesh | None = None  # the dense one with `fsdp` in its parts, with context parallelism
    stage: dist.ProcessGroup | None = None  # the ranks that share this one's stages
    replica: dist.ProcessGroup | None = None  # those of them in one replica

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.degrees.per_stage

    @property
    def data_rank(self) -> int:
        """The index of this rank's rows of a batch."""
        return self.rank % self.degrees.per_stage // (self.degrees.context * self.degrees.tensor)

    @property
    def context_rank(self) -> int:
        """The index of this rank's part of each row."""
        return self.rank // self.degrees.tensor % self.degrees.context

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.degrees.tensor

    @property
    def replicate_rank(self) -> int:
        return self.data_rank // self.degrees.shard

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """This rank's pipeline; None: all ranks."""
        return self.group(PIPELINE)

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every pipeline, in order."""
        per_stage = self.degrees.per_stage
        return tuple(tuple(range(first, self.degrees.world_size, per_stage)) for first in range(per_stage))

    @property
    def writer(self) -> int:
        """Which part of its stages this rank writes, if it is in the first replica."""
        return self.rank % self.degrees.per_replica

    @property
    def num_writers(self) -> int:
        return self.degrees.per_replica

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is counted: tensor-parallel ranks have the same one."""
        return self.tensor_rank == 0

    def group(self, dim: str) -> dist.ProcessGroup | None:
        return None if self.device_mesh is None else self._mesh_with(dim).get_group(dim)

    def part(self, *dims: str) -> DeviceMesh:
        """Return the submesh of these dimensions, which one of the meshes has."""
        return self._mesh_with(*dims)[dims]

    def _mesh_with(self, *dims: str) -> DeviceMesh:
        meshes = (self.device_mesh, self.sparse_mesh, self.context_mesh)
        return next(mesh for mesh in meshes if mesh is not None and {*dims} <= {*(mesh.mesh_dim_names or ())})

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this is the first of the ranks with the same part of a parameter."""
        place = {REPLICATE: self.replicate_rank}
        if EXPERT in mesh_dims(parameter):  # other ranks have other experts, whatever their place in the dense mesh
            place[EXPERT_FSDP] = self.writer // self.degrees.expert
        else:
            place |= {FSDP: self.writer // self.degrees.tensor, TENSOR: self.tensor_rank}
        return not any(rank for dim, rank in place.items() if dim not in sharded_dims(parameter))


def build_mesh(degrees: ParallelDims, rank: int, device: torch.device, timeout: timedelta) -> Mesh:
    """Create the device meshes and the process group of each stage. Every rank calls this."""
    if degrees.per_stage == 1:
        return Mesh(degrees=degrees, rank=rank)
    around = degrees.pipeline, degrees.replicate
    dense_shape, sparse_shape = (degrees.fsdp, degrees.tensor), (degrees.expert_fsdp, degrees.expert)
    device_mesh = init_device_mesh(device.type, (*around, *dense_shape), mesh_dim_names=_DENSE)
    sparse_mesh = context_mesh = None
    if degrees.expert > 1:
        sparse_mesh = init_device_mesh(device.type, (*around, *sparse_shape), mesh_dim_names=_SPARSE)
    if degrees.context > 1:
        context_mesh = device_mesh._unflatten(FSDP, (degrees.shard, degrees.context), (SHARD, CONTEXT))
    for mesh in filter(None, (device_mesh, sparse_mesh, context_mesh)):
        for name in mesh.mesh_dim_names or ():
            # A new group does not inherit the world's timeout.
            _set_pg_timeout(timeout, mesh.get_group(name))
    replica: dist.ProcessGroup | None
    replica = stage = _group_of(degrees.per_stage, degrees.world_size, timeout)
    if degrees.replicate > 1:
        replica = _group_of(degrees.per_replica, degrees.world_size, timeout) if degrees.per_replica > 1 else None
    return Mesh(
        degrees=degrees,
        rank=rank,
        device_mesh=device_mesh,
        sparse_mesh=sparse_mesh,
        context_mesh=context_mesh,
        stage=stage,
        replica=replica,
    )


def _group_of(size: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Create a group of each `size` consecutive ranks, and return this rank's."""
    ranks = [list(range(first, first + size)) for first in range(0, world_size, size)]
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)[0]  # type: ignore[no-untyped-call]
    return group
