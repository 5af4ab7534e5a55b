"""The device mesh: this rank's coordinates in the pipeline, data-parallel and tensor-parallel dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from runner.config.parallel_dims import PIPELINE, REPLICATE, SHARD, TENSOR, ParallelDims
from runner.tensors.dtensor import sharded_dims


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mesh:
    """One rank's coordinates. If each stage has one rank, there is no device mesh: all ranks are one pipeline."""

    degrees: ParallelDims
    rank: int
    device_mesh: DeviceMesh | None = None
    stage: dist.ProcessGroup | None = None  # the ranks that share this one's stages

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.degrees.per_stage

    @property
    def data_rank(self) -> int:
        """The index of this rank's rows of a batch."""
        return self.rank % self.degrees.per_stage // self.degrees.tensor

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.degrees.tensor

    @property
    def replicate_rank(self) -> int:
        return self.data_rank // self.degrees.shard

    @property
    def shard_rank(self) -> int:
        return self.data_rank % self.degrees.shard

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
        return self.shard_rank * self.degrees.tensor + self.tensor_rank

    @property
    def num_writers(self) -> int:
        return self.degrees.shard * self.degrees.tensor

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is counted: tensor-parallel ranks have the same one."""
        return self.tensor_rank == 0

    def group(self, dim: str) -> dist.ProcessGroup | None:
        return None if self.device_mesh is None else self.device_mesh.get_group(dim)

    def part(self, *dims: str) -> DeviceMesh:
        """Return the submesh of these dimensions."""
        assert self.device_mesh is not None
        return self.device_mesh[dims]

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this is the first of the ranks with the same part of a parameter."""
        place = {REPLICATE: self.replicate_rank, SHARD: self.shard_rank, TENSOR: self.tensor_rank}
        return not any(rank for dim, rank in place.items() if dim not in sharded_dims(parameter))


def pair_mesh(rank: int) -> Mesh:
    """Create a mesh of ranks 0 and 1, tensor-parallel on the CPU, for a tiny model. Every rank calls this."""
    device_mesh = DeviceMesh("cpu", [[[[0, 1]]]], mesh_dim_names=(PIPELINE, REPLICATE, SHARD, TENSOR))
    return Mesh(degrees=ParallelDims(pipeline=1, tensor=2), rank=rank, device_mesh=device_mesh)


def build_mesh(degrees: ParallelDims, rank: int, device: torch.device, timeout: timedelta) -> Mesh:
    """Create the device mesh and the process group of each stage. Every rank calls this."""
    if degrees.per_stage == 1:
        return Mesh(degrees=degrees, rank=rank)
    shape = (degrees.pipeline, degrees.replicate, degrees.shard, degrees.tensor)
    names = (PIPELINE, REPLICATE, SHARD, TENSOR)
    device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for name in names:
        # A new group does not inherit the world's timeout.
        _set_pg_timeout(timeout, device_mesh.get_group(name))
    stage: dist.ProcessGroup | None = None
    for first in range(0, degrees.world_size, degrees.per_stage):
        ranks = range(first, first + degrees.per_stage)
        group = dist.new_group(list(ranks), timeout=timeout)
        stage = group if rank in ranks else stage
    return Mesh(degrees=degrees, rank=rank, device_mesh=device_mesh, stage=stage)
