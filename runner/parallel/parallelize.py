"""What stages that several ranks share do: FSDP, tensor and expert parallelism, parts of rows, one reduction a step.

No list says which architectures compute parts of rows, or documents apart, correctly: see Note [Proof of the
combination].

# Note [One reduction a step]
Schedules run backwards microbatch by microbatch, some in two parts, and none of torch's own hooks is right for all of
them. So gradients are accumulated locally while a schedule runs, in the dtype of masters, or, where FSDP shards them,
in that of the reduction if it is wider. When it has ended, `reduce_gradients` makes FSDP reduce-scatter them, and
all-reduces over replicas those that are not sharded: once per step, in the dtype of the reduction, by sum, because the
loss is already the mean over the valid tokens of all ranks (Note [Loss over tokens]).

# Note [Tensor parallelism]
Matrices are sharded as in Megatron: the first of a block column-wise, so that each rank has whole heads or hidden
units, the last row-wise. Inputs and outputs of a block are replicated, so stages send the same tensors as without
tensor parallelism, on every schedule, and norms and routing are the same on all ranks. See Note [Plans of
transformers] in tensor_plan.py.

# Note [Expert parallelism]
Each rank has whole experts. Tokens go to the ranks of their experts and back by two all-to-alls, within a replica:
ranks of the dimension `ep` have different rows, parts of rows, or tensor-parallel slices of one batch, so each token is
sent once, and gradients of an expert come from all of them. What is left to sum are the gradients of ranks with the
same experts, over `efsdp`, which FSDP does, and over replicas. A rank that no token is sent to runs one row through its
experts and drops the result: it takes part in the backward's collectives.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from manifests.errors import UsageError
from manifests.models.adapters import is_adapter
from manifests.models.combinations import check_constant
from manifests.models.training import ContextMethod
from runner.config.parallel_dims import (
    CONTEXT,
    EXPERT,
    EXPERT_FSDP,
    FSDP,
    REPLICATE,
    TENSOR,
    ParallelDims,
    check_float32,
    is_sharded,
)
from runner.config.schema import ComputeOptions
from runner.models.family import Family, OnTransformers, Planned
from runner.parallel.mesh import Mesh
from runner.pipeline.chunk import StageChunk, float32_names, layers_of
from runner.tensors.dtensor import local_of, mesh_dims
from runner.tensors.local_shard import FLAG_DTYPES
from runner.tensors.row_parts import RowParts

_BUCKET = 1 << 24  # elements that are all-reduced at a time


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parallel:
    """Collectives of the ranks that share this rank's stages, before and after a schedule; each of them calls these."""

    mesh: Mesh
    chunks: tuple[StageChunk, ...]
    reduce_dtype: torch.dtype
    dtype: torch.dtype  # of parameters, or of their masters; some may be kept in float32 beside it

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
            _reduce_sharded(root, self.reduce_dtype)
        degrees = self.mesh.degrees
        if degrees.tensor > 1:
            of_heads = (parameter for chunk in self.chunks for parameter in summed_over_heads(chunk))
            partial = [parameter for parameter in of_heads if parameter.requires_grad]
            _all_reduce(partial, self.mesh.group(TENSOR), torch.promote_types(torch.float32, self.dtype))
        if degrees.replicate > 1:
            parameters = (weight for chunk in self.chunks for weight in chunk.body.parameters() if weight.requires_grad)
            replicated = [parameter for parameter in parameters if REPLICATE not in mesh_dims(parameter)]
            group = self.mesh.group(REPLICATE)
            for is_kept, dtype in ((True, torch.float32), (False, self.reduce_dtype)):
                some = (weight for weight in replicated if (weight.dtype.itemsize > self.dtype.itemsize) == is_kept)
                _all_reduce(some, group, dtype)

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


def parallelize(chunk: StageChunk, mesh: Mesh, compute: ComputeOptions) -> None:
    """Apply expert and tensor parallelism and FSDP to a chunk, which is on the meta device, in its masters' dtype."""
    if mesh.degrees.expert > 1:
        assert isinstance(chunk.family, Planned), "refused before"
        chunk.family.distribute_experts(chunk.body, mesh.part(EXPERT), mesh.part(TENSOR))
    share_matrices(chunk, mesh)
    if is_sharded(mesh.degrees, compute) and any(True for _ in chunk.body.parameters()):
        _shard(chunk, mesh, compute)


def check_plans(family: Family, degrees: ParallelDims) -> None:
    """Check that a family has the plans that these degrees need; those of other packages are unknown until built."""
    if degrees.tensor == degrees.expert == 1:
        return
    plans = family.plans() if isinstance(family, Planned) else ()
    for kind, degree in (("tp", degrees.tensor), ("ep", degrees.expert)):
        if degree > 1 and kind not in plans:
            problem = f"the family of {family.architecture} has no plan of how to distribute its modules"
            hint = f"remove --{kind}, or give its family a plan: docs/own-models.md shows one"
            raise UsageError(f"--{kind}", problem, hint, code=f"options.{kind}-architecture")


def _shard(chunk: StageChunk, mesh: Mesh, compute: ComputeOptions) -> None:
    exact = float32_names(chunk, FLAG_DTYPES[compute.dtype])
    exact = [name for name, _ in chunk.body.named_parameters() if name in exact]
    check_float32(chunk.family.architecture, exact, compute, mesh.degrees)
    dtype = FLAG_DTYPES[compute.dtype] if compute.has_masters or chunk.dtypes else None
    # What stages compute in float32 stays so: parameters as the family has them, and the inputs of layers.
    # FSDP accumulates in its reduce_dtype, too: `_reduce_sharded` sets that of the reduction alone.
    sum_dtype = torch.promote_types(FLAG_DTYPES[compute.master_dtype], FLAG_DTYPES[compute.reduce_dtype])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=sum_dtype, cast_forward_inputs=False)
    around = (REPLICATE,) if mesh.degrees.replicate > 1 else ()
    experts = [module for module in chunk.body.modules() if any(map(_is_expert, module.parameters(recurse=False)))]
    # Adapters of experts are whole on every rank: each is gathered by itself, where its product is computed.
    adapters = [part for module in experts for name, part in module.named_modules() if is_adapter(f".{name}.weight")]
    for module in (*adapters, *experts, *(layer for _, layer in layers_of(chunk)), chunk.body):
        # Zero-bubble schedules need the parameters after the forward has ended.
        shard = partial(fully_shard, module, reshard_after_forward=False, mp_policy=policy)
        if module in experts:
            shard(mesh=mesh.part(*around, EXPERT_FSDP), shard_placement_fn=partial(_expert_placement, mesh.degrees))
        else:
            shard(mesh=mesh.part(*around, FSDP))
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
        module.set_reduce_scatter_unused_params(True)  # an expert may have no tokens on some ranks
    _gather_in_float32(chunk.body, frozenset(exact))
    chunk.accumulate = partial(_accumulate, chunk.body)
    # FSDP warns that it misses the backward of an output that is a view and changed in place: ours never are.
    for sharded in {type(module).__name__ for module in (*experts, chunk.body)}:
        warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({sharded}\) returned a view tensor", UserWarning)


def _gather_in_float32(body: nn.Module, names: Collection[str]) -> None:
    """Let FSDP leave these parameters in float32 when it gathers the others of their groups in the compute dtype.

    It takes the dtypes from the policy of the group, parameter by parameter, when the first forward begins.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    paths = {module: name for name, module in body.named_modules()}
    sharded = (module for module in body.modules() if names and isinstance(module, FSDPModule))
    groups = (group for module in sharded for group in fully_shard.state(module)._fsdp_param_groups)  # type: ignore[attr-defined]
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        place = parameter._module_info
        if f"{paths[place.module]}.{place.param_name}" in names:
            parameter.init_dtype_attrs = partial(_take_dtypes_of, type(parameter), parameter, policy)


def _take_dtypes_of(kind: Any, parameter: Any, policy: MixedPrecisionPolicy, _: MixedPrecisionPolicy) -> None:
    kind.init_dtype_attrs(parameter, policy)


def _is_expert(parameter: nn.Parameter) -> bool:
    return EXPERT in mesh_dims(parameter)


def _expert_placement(degrees: ParallelDims, parameter: nn.Parameter) -> Shard | None:
    """Return how FSDP shards experts that a rank has: whole experts, or the first dimension that it divides."""
    num_experts, *rest = parameter.shape
    sizes = (num_experts // degrees.expert, *rest)
    return next((Shard(dim) for dim, size in enumerate(sizes) if size % degrees.expert_fsdp == 0), None)


def _reduce_sharded(root: FSDPModule, dtype: torch.dtype) -> None:
    """Reduce-scatter gradients, as torch does when a backward ends; see Note [One reduction a step].

    Source: `perform_reduce_grad` in torch/distributed/pipelining/stage.py, torch 2.13; its parts are in 2.15, too.
    """
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    # torch's own zeros have the dtype of computation, and it reduces no group of parameters with two dtypes.
    _accumulate(root, adds_zeros=True)
    for group in _groups_of(root):
        if group.mesh_info.mesh.size() > 1:  # a rank alone has its gradients as they are
            group._reduce_dtype = dtype
        group.post_backward()
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def _accumulate(root: nn.Module | FSDPModule, *, adds_zeros: bool = False) -> None:
    """Add gradients to those before in the dtype of the policy, as torch does when a whole backward has ended."""
    for parameter in (parameter for group in _groups_of(root) for parameter in group.fsdp_params):
        unsharded = getattr(parameter, "_unsharded_param", None)  # None: never gathered
        if unsharded is None or not unsharded.requires_grad:
            continue
        if adds_zeros and unsharded.grad is None and parameter.unsharded_accumulated_grad is None:
            unsharded.grad = torch.zeros_like(unsharded)
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def _groups_of(root: nn.Module | FSDPModule) -> Iterator[Any]:
    states = fully_shard.state(root)._state_ctx.all_states  # type: ignore[attr-defined]
    return (group for state in states for group in state._fsdp_param_groups)


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


def share_matrices(chunk: StageChunk, mesh: Mesh) -> None:
    """Shard the matrices of a chunk, which is on the meta device, if this run has tensor-parallel ranks."""
    if mesh.degrees.tensor > 1:
        assert isinstance(chunk.family, Planned), "refused before"
        chunk.family.shard(chunk.body, mesh.part(TENSOR))


def summed_over_heads(chunk: StageChunk) -> Iterator[nn.Parameter]:
    """Yield the parameters whose gradients on a rank cover only its own heads, and must be reduced."""
    assert isinstance(chunk.family, Planned), "refused before"
    return chunk.family.summed_over_heads(chunk.body)


_APART = "leave --document-mask out, or use --no-packing, which has one document in each sequence"
_WHOLE = "leave --cp out; more stages, --dp-shard and --ac save memory, too"


def keep_documents(family: Family, seq_len: int) -> None:
    """Let a family's modules keep packed documents apart; every rank calls this."""
    if "position_ids" in family.row_inputs:
        return
    if not isinstance(family, OnTransformers):
        problem = f"is not supported for {family.architecture}, whose family's modules take no position_ids"
        raise UsageError("--document-mask", problem, _APART, code="options.document-mask")
    check_constant("--document-mask", family.architecture, seq_len, family.padded_length(1, seq_len))
    family.keep_documents()


def split_rows(family: Family, mesh: Mesh, method: ContextMethod, seq_len: int = 1) -> None:
    """Let a family's modules run on this rank's part of each row; every rank calls this."""
    if not isinstance(family, OnTransformers):
        problem = f"is not supported for {family.architecture}, which is not trained on transformers' modules"
        raise UsageError("--cp", problem, _WHOLE, code="options.cp-architecture")
    check_constant("--cp", family.architecture, seq_len, family.padded_length(1, seq_len))
    gathers, group = method == "gather", mesh.group(CONTEXT)
    family.split_rows(RowParts(rank=mesh.context_rank, size=mesh.degrees.context, gathers=gathers, group=group))
