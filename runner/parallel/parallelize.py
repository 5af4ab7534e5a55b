"""FSDP and tensor parallelism for stages that several ranks share, with one gradient reduction per step.

# Note [One reduction a step]
Schedules run backwards microbatch by microbatch, some in two parts, and none of torch's own hooks is right for all of
them. So gradients are accumulated locally while a schedule runs. When it has ended, `reduce_gradients` makes FSDP
reduce-scatter them, and all-reduces over replicas those that are not sharded: once per step, by sum, because the loss
is already the mean over the valid tokens of all ranks (Note [Loss over tokens]).
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
from runner.parallel.tensor_parallel import shard_matrices, summed_over_heads
from runner.pipeline.chunk import StageChunk, layers_of
from runner.tensors.dtensor import local_of, mesh_dims
from runner.tensors.local_shard import FLAG_DTYPES

_BUCKET = 1 << 24  # elements that are all-reduced at a time


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parallel:
    """Collectives of the ranks that share this rank's stages, before and after a schedule; each of them calls these."""

    mesh: Mesh
    chunks: tuple[StageChunk, ...]
    reduce_dtype: torch.dtype

    def defer_gradient_sync(self) -> None:
        """Accumulate gradients locally, and keep parameters unsharded once gathered, until `reduce_gradients`."""
        for module in self._sharded():
            module.set_is_last_backward(False)
            module.set_reshard_after_backward(False)
            module.set_requires_gradient_sync(False)

    def reduce_gradients(self) -> None:
        """Make each parameter's `.grad` the sum over all ranks that share it, and reshard parameters.

        The gradients of tied weights are summed after this, so that replicas are bitwise equal on all stages.
        """
        for root in self._roots():
            _reduce_sharded(root)
        degrees = self.mesh.degrees
        if degrees.tensor > 1:
            partial = [parameter for chunk in self.chunks for parameter in summed_over_heads(chunk)]
            _all_reduce(partial, self.mesh.group(TENSOR), torch.float32)
        if degrees.replicate > 1:
            parameters = (parameter for chunk in self.chunks for parameter in chunk.body.parameters())
            replicated = [parameter for parameter in parameters if REPLICATE not in mesh_dims(parameter)]
            _all_reduce(replicated, self.mesh.group(REPLICATE), self.reduce_dtype)

    def reshard(self) -> None:
        """Free the parameters that a forward has gathered."""
        for module in self._sharded():
            module.reshard()

    def _roots(self) -> Iterator[FSDPModule]:
        return (chunk.body for chunk in self.chunks if isinstance(chunk.body, FSDPModule))

    def _sharded(self) -> Iterator[FSDPModule]:
        for root in self._roots():
            assert isinstance(root, nn.Module)
            yield from (module for module in root.modules() if isinstance(module, FSDPModule))


def is_sharded(mesh: Mesh, compute: ComputeOptions) -> bool:
    """Whether FSDP is used: to shard parameters, or for master weights of tensor-parallel matrices."""
    return mesh.degrees.shard > 1 or (mesh.degrees.tensor > 1 and compute.has_masters)


def parallelize(chunk: StageChunk, mesh: Mesh, compute: ComputeOptions) -> None:
    """Apply tensor parallelism and FSDP to a chunk, which is on the meta device and has the dtype of its masters."""
    if mesh.degrees.tensor > 1:
        shard_matrices(chunk, mesh.part(TENSOR))
    if is_sharded(mesh, compute) and any(True for _ in chunk.body.parameters()):
        _shard(chunk, mesh.part(*(DATA_DIMS if mesh.degrees.replicate > 1 else (SHARD,))), compute)


def _shard(chunk: StageChunk, mesh: DeviceMesh, compute: ComputeOptions) -> None:
    dtype = FLAG_DTYPES[compute.dtype] if compute.has_masters else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FLAG_DTYPES[compute.reduce_dtype])
    for module in (*(layer for _, layer in layers_of(chunk)), chunk.body):
        # Zero-bubble schedules need the parameters after the forward has ended.
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
        module.set_reduce_scatter_unused_params(True)  # an expert may have no tokens on some ranks
    # FSDP warns that it misses the backward of an output that is a view and changed in place: ours never are.
    sharded = type(chunk.body).__name__
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({sharded}\) returned a view tensor", UserWarning)


def _reduce_sharded(root: FSDPModule) -> None:
    """Reduce-scatter gradients, as torch does when a backward ends; see Note [One reduction a step].

    Source: `perform_reduce_grad` in torch/distributed/pipelining/stage.py, torch 2.13; its parts are in 2.15, too.
    """
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for fsdp_state in state._state_ctx.all_states:
        for group in fsdp_state._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


@torch.no_grad()
def _all_reduce(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
    """All-reduce these gradients over a group, in buckets."""
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(local_of(parameter.grad))
        if sum(gradient.numel() for gradient in bucket) >= _BUCKET:
            _all_reduce_bucket(bucket, group, dtype)
            bucket = []
    if bucket:
        _all_reduce_bucket(bucket, group, dtype)


def _all_reduce_bucket(bucket: Sequence[torch.Tensor], group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
    flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in bucket])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(bucket, torch.split(flat, [gradient.numel() for gradient in bucket]), strict=True):
        gradient.copy_(total.view(gradient.shape))
