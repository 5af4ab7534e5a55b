"""Stages that several ranks share: their matrices cut over tensor-parallel ranks, their memory over data-parallel ones.

# Note [One reduction a step]
Schedules run backwards microbatch by microbatch, some in two parts, and none of torch's own hooks is right on
all of them. So no gradient leaves its rank while a schedule runs. When it has ended, `reduce_gradients` lets
FSDP scatter the sums, and adds up over replicas what no one shards: once a step, by sum, because the loss
is already over the valid tokens of all ranks (Note [Loss over tokens]).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from runner.config.parallel_dims import DATA_DIMS, REPLICATE, SHARD, TENSOR
from runner.config.schema import ComputeOptions
from runner.parallel.mesh import Mesh
from runner.parallel.tensor_parallel import cut_matrices, summed_over_heads
from runner.pipeline.chunk import StageChunk, layers_of
from runner.tensors.dtensor import local_of, mesh_dims

__all__ = ["Parallel", "is_sharded", "parallelize"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BUCKET = 1 << 24  # elements that are added up over replicas at a time


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parallel:
    """What the ranks that share this rank's stages do together around a schedule; every one of them calls it."""

    mesh: Mesh
    chunks: tuple[StageChunk, ...]
    reduce_dtype: torch.dtype

    def defer_gradient_sync(self) -> None:
        """Keep gradients here, and parameters whole once they are gathered, until `reduce_gradients`."""
        for module in self._sharded():
            module.set_is_last_backward(False)
            module.set_reshard_after_backward(False)
            module.set_requires_gradient_sync(False)

    def reduce_gradients(self) -> None:
        """Make each parameter's `.grad` the sum over all ranks that share it, and give back what was gathered.

        Tied weights are added up after this: then their copies are the same bits on all stages.
        """
        for root in self._roots():
            _reduce_sharded(root)
        degrees = self.mesh.degrees
        if degrees.tensor > 1:
            partial = [parameter for chunk in self.chunks for parameter in summed_over_heads(chunk)]
            _add_up(partial, self.mesh.group(TENSOR), torch.float32)
        if degrees.replicate > 1:
            parameters = (parameter for chunk in self.chunks for parameter in chunk.body.parameters())
            left = [parameter for parameter in parameters if REPLICATE not in mesh_dims(parameter)]
            _add_up(left, self.mesh.group(REPLICATE), self.reduce_dtype)

    def reshard(self) -> None:
        """Give back what a forward has gathered."""
        for module in self._sharded():
            module.reshard()

    def _roots(self) -> Iterator[FSDPModule]:
        return (chunk.body for chunk in self.chunks if isinstance(chunk.body, FSDPModule))

    def _sharded(self) -> Iterator[FSDPModule]:
        for root in self._roots():
            assert isinstance(root, nn.Module)
            yield from (module for module in root.modules() if isinstance(module, FSDPModule))


def is_sharded(mesh: Mesh, compute: ComputeOptions) -> bool:
    """Whether FSDP holds the parameters: for their memory's sake, or for masters of cut matrices."""
    return mesh.degrees.shard > 1 or (mesh.degrees.tensor > 1 and compute.has_masters)


def parallelize(chunk: StageChunk, mesh: Mesh, compute: ComputeOptions) -> None:
    """Let this rank hold its part of a chunk, which is on the meta device and in the dtype of its masters."""
    if mesh.degrees.tensor > 1:
        cut_matrices(chunk, mesh.part(TENSOR))
    if is_sharded(mesh, compute) and any(True for _ in chunk.body.parameters()):
        _shard(chunk, mesh.part(*(DATA_DIMS if mesh.degrees.replicate > 1 else (SHARD,))), compute)


def _shard(chunk: StageChunk, mesh: DeviceMesh, compute: ComputeOptions) -> None:
    dtype = _DTYPES[compute.dtype] if compute.has_masters else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=_DTYPES[compute.reduce_dtype])
    for module in (*(layer for _, layer in layers_of(chunk)), chunk.body):
        # Freed after the forward, parameters would be gone when zero-bubble schedules want them.
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds
        module.set_reduce_scatter_unused_params(True)  # an expert may have had no tokens on some ranks
    # FSDP misses a backward through an output that is a view and changed in place: stages' outputs never are.
    sharded = type(chunk.body).__name__
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({sharded}\) returned a view tensor", UserWarning)


def _reduce_sharded(root: FSDPModule) -> None:
    """Scatter the sums of gradients, as torch does when a backward ends; see Note [One reduction a step].

    Source: `perform_reduce_grad` in torch/distributed/pipelining/stage.py, torch 2.13.
    """
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


@torch.no_grad()
def _add_up(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
    """Make these gradients their sums over a group, some at a time in one message."""
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(local_of(parameter.grad))
        if sum(gradient.numel() for gradient in bucket) >= _BUCKET:
            _add_up_bucket(bucket, group, dtype)
            bucket = []
    if bucket:
        _add_up_bucket(bucket, group, dtype)


def _add_up_bucket(bucket: Sequence[torch.Tensor], group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
    flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in bucket])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(bucket, torch.split(flat, [gradient.numel() for gradient in bucket]), strict=True):
        gradient.copy_(total.view(gradient.shape))
