"""FSDP and tensor parallelism for stages that several ranks share, with one gradient reduction per step.

# Note [One reduction a step]
Schedules run backwards microbatch by microbatch, some in two parts, and none of torch's own hooks is right for all of
them. So gradients are accumulated locally while a schedule runs. When it has ended, `reduce_gradients` makes FSDP
reduce-scatter them, and all-reduces over replicas those that are not sharded: once per step, by sum, because the loss
is already the mean over the valid tokens of all ranks (Note [Loss over tokens]).

# Note [Tensor parallelism]
Matrices are sharded as in Megatron: the first of a block column-wise, so that each rank has whole heads or hidden
units, the last row-wise. Inputs and outputs of a block are replicated, so stages send the same tensors as without
tensor parallelism, on every schedule, and norms and routing are the same on all ranks.

Each expert is sharded like an MLP. A rank weights its part of an expert's output, and parts are reduced after all
experts of a token; gradients of tokens and routing weights are reduced where both enter the experts. In latent
attention, the projections to latents are replicated. The rotary part of the key is shared by all heads and bypasses
the sharded matrices, so its gradient is reduced where it is split off.

# Note [Expert parallelism]
Each rank has whole experts. Tokens go to the ranks of their experts and back by two all-to-alls, within a replica:
ranks of the dimension `ep` have different rows, parts of rows, or tensor-parallel slices of one batch, so each token is
sent once, and gradients of an expert come from all of them. What is left to sum are the gradients of ranks with the
same experts, over `efsdp`, which FSDP does, and over replicas. A rank that no token is sent to runs one row through its
experts and drops the result: it takes part in the backward's collectives.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from runner.config.parallel_dims import EXPERT, EXPERT_FSDP, FSDP, REPLICATE, TENSOR, ParallelDims
from runner.config.schema import ComputeOptions
from runner.config.sharding import check_float32, is_sharded
from runner.models.family import Family
from runner.parallel.mesh import Mesh
from runner.pipeline.chunk import StageChunk, float32_names, layers_of
from runner.tensors.dtensor import local_of, mesh_dims
from runner.tensors.local_shard import FLAG_DTYPES

_BUCKET = 1 << 24  # elements that are all-reduced at a time
_COLWISE, _ROWWISE, _WHOLE = "colwise", "rowwise", "whole"
# Every linear module of a layer, by the last two parts of its name.
_LINEAR: Mapping[str, str] = {
    "qkv_linear.wq": _COLWISE,
    "qkv_linear.wk": _COLWISE,
    "qkv_linear.wv": _COLWISE,
    "attention.wq": _COLWISE,
    "attention.wq_a": _WHOLE,
    "attention.wq_b": _COLWISE,
    "attention.wkv_a": _WHOLE,
    "attention.wkv_b": _COLWISE,
    "attention.wo": _ROWWISE,
    "feed_forward.w1": _COLWISE,
    "feed_forward.w3": _COLWISE,
    "feed_forward.w2": _ROWWISE,
    "shared_experts.w1": _COLWISE,
    "shared_experts.w3": _COLWISE,
    "shared_experts.w2": _ROWWISE,
    "router.gate": _WHOLE,
}
# Every parameter of a layer's experts, with its dimension of hidden units; None: it has none.
_EXPERTS: Mapping[str, int | None] = {
    "w1_EFD": 1,
    "w3_EFD": 1,
    "w2_EDF": 2,
    "mlp1_weight_EGD": 1,  # gates and units in turn
    "mlp1_bias_EG": 1,
    "mlp2_weight_EDF": 2,
    "mlp2_bias_ED": None,
}
_LATENT = "kv_lora_rank"  # an attribute of latent attention
# Shared by all heads: a rank's gradient covers only its own heads.
_OF_HEADS = ("q_norm", "k_norm")


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
            _reduce_sharded(root)
        degrees = self.mesh.degrees
        if degrees.tensor > 1:
            of_heads = (parameter for chunk in self.chunks for parameter in summed_over_heads(chunk))
            partial = [parameter for parameter in of_heads if parameter.requires_grad]
            _all_reduce(partial, self.mesh.group(TENSOR), torch.float32)
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
        assert isinstance(chunk.family, ExpertParallel), "refused before"
        chunk.family.distribute_experts(chunk.body, mesh.part(EXPERT), mesh.part(TENSOR))
    share_matrices(chunk, mesh)
    if is_sharded(mesh.degrees, compute) and any(True for _ in chunk.body.parameters()):
        _shard(chunk, mesh, compute)


def _shard(chunk: StageChunk, mesh: Mesh, compute: ComputeOptions) -> None:
    exact = float32_names(chunk, FLAG_DTYPES[compute.dtype])
    exact = [name for name, _ in chunk.body.named_parameters() if name in exact]
    check_float32(chunk.family.architecture, exact, compute, mesh.degrees)
    dtype = FLAG_DTYPES[compute.dtype] if compute.has_masters else None
    # What stages compute in float32 stays so: parameters as the family has them, and the inputs of layers.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=FLAG_DTYPES[compute.reduce_dtype], cast_forward_inputs=False
    )
    around = (REPLICATE,) if mesh.degrees.replicate > 1 else ()
    experts = [module for module in chunk.body.modules() if any(map(_is_expert, module.parameters(recurse=False)))]
    for module in (*experts, *(layer for _, layer in layers_of(chunk)), chunk.body):
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


@runtime_checkable
class Planned(Family, Protocol):
    """A family that knows how its own modules are sharded."""

    def shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard what `build` returned, which is on the meta device, over the tensor-parallel ranks of a mesh."""
        ...

    def summed_over_heads(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """See `summed_over_heads` in this file."""
        ...


@runtime_checkable
class ExpertParallel(Family, Protocol):
    """A family whose experts can be distributed over ranks."""

    def distribute_experts(self, module: nn.Module, mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> None:
        """Distribute the experts of what `build` returned, which is on the meta device, over the ranks of a mesh.

        The ranks of `tensor_mesh` have the same tokens. No plan of tensor parallelism applies to these experts.
        """
        ...


def share_matrices(chunk: StageChunk, mesh: Mesh) -> None:
    """Shard the matrices of a chunk, which is on the meta device, if this run has tensor-parallel ranks."""
    if mesh.degrees.tensor > 1:
        shard_matrices(chunk, mesh.part(TENSOR))


def shard_matrices(chunk: StageChunk, mesh: DeviceMesh) -> None:
    """Shard the matrices of a chunk, which is on the meta device, over tensor-parallel ranks."""
    if isinstance(chunk.family, Planned):
        chunk.family.shard(chunk.body, mesh)
        return
    plan: dict[str, ParallelStyle] = {}
    present = {name for name, _ in chunk.body.named_modules()}
    if "tok_embeddings" in present:
        plan["tok_embeddings"] = _VocabularyParallel()
    if "lm_head" in present:
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    for number, layer in layers_of(chunk):
        plan |= {f"layers.{number}.{name}": style for name, style in _layer_plan(layer)}
    assert plan.keys() <= present, f"no tensor-parallel plan for {chunk.family.architecture}"
    parallelize_module(chunk.body, mesh, plan)


def summed_over_heads(chunk: StageChunk) -> Iterator[nn.Parameter]:
    """Yield the parameters whose gradients on a rank cover only its own heads, and must be reduced."""
    if isinstance(chunk.family, Planned):
        yield from chunk.family.summed_over_heads(chunk.body)
        return
    for _, layer in layers_of(chunk):
        attention = layer.get_submodule("attention")
        if hasattr(attention, _LATENT):  # its norms are of latents, which are replicated
            continue
        for name, module in attention.named_modules():
            if name.split(".")[-1] in _OF_HEADS:
                yield from module.parameters()


def _layer_plan(layer: nn.Module) -> Iterator[tuple[str, ParallelStyle]]:
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            cut = _LINEAR[".".join(name.split(".")[-2:])]
            if cut != _WHOLE:
                yield name, ColwiseParallel() if cut == _COLWISE else RowwiseParallel()
        elif name == "attention" and hasattr(module, _LATENT):
            yield name, _LatentParallel()
        elif name == "attention" and hasattr(module, "sinks"):
            yield name, _SinksParallel()
        elif name == "moe.routed_experts":
            yield name, _ExpertParallel()


class _VocabularyParallel(ParallelStyle):
    """torchtitan's embedding, sharded by rows: given a group, it embeds the tokens in its own rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        module.tp_group = device_mesh.get_group()  # type: ignore[assignment]
        if (
            module.padding_idx is not None
        ):  # an index of the whole vocabulary; torchtitan looks up a rank's rows by their local index
            rows = module.num_embeddings // device_mesh.size()
            rank, place = divmod(module.padding_idx, rows)
            module.padding_idx = place if rank == device_mesh.get_local_rank() else None
        _place(module, "weight", device_mesh, Shard(0))
        module.register_forward_hook(lambda _, args, out: _summed(out, device_mesh))
        return module


class _LatentParallel(ParallelStyle):
    """Latent attention, whose heads share the rotary part of the key."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank = getattr(module, _LATENT)

        def split_off(_: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
            return torch.cat([out[..., :rank], _summed_backwards(out[..., rank:], device_mesh)], dim=-1)

        module.get_submodule("wkv_a").register_forward_hook(split_off)
        return module


class _SinksParallel(ParallelStyle):
    """Attention with a sink per head."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _place(module, "sinks", device_mesh, Shard(0))
        return module


class _ExpertParallel(ParallelStyle):
    """Experts, each sharded by its hidden units; see Note [Tensor parallelism]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts = module.get_submodule("inner_experts")
        for name, _ in list(experts.named_parameters(recurse=False)):
            dim = _EXPERTS[name]
            _place(experts, name, device_mesh, Replicate() if dim is None else Shard(dim))

        def enter(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            tokens, weights, *chosen = args
            return (_summed_backwards(tokens, device_mesh), _summed_backwards(weights, device_mesh), *chosen)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda _, args, out: _summed(out, device_mesh))
        return module


def _place(module: nn.Module, name: str, mesh: DeviceMesh, where: Placement) -> None:
    whole = distribute_tensor(module.get_parameter(name), mesh, (where,))
    module.register_parameter(name, nn.Parameter(whole))


def _summed(partial: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum the ranks' partial values in the forward; the gradient is replicated."""
    whole: torch.Tensor = DTensor.from_local(partial, mesh, (Partial(),)).redistribute(mesh, (Replicate(),)).to_local()
    return whole


def _summed_backwards(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a replicated value; its partial gradients are summed in the backward."""
    same: torch.Tensor = DTensor.from_local(whole, mesh, (Replicate(),), run_check=False).to_local(
        grad_placements=(Partial(),)
    )
    return same
