"""Tensor parallelism of attention, MLPs and experts.

# Note [Tensor parallelism]
Matrices are sharded as in Megatron: the first of a block column-wise, so that each rank has whole heads or hidden
units, the last row-wise. Inputs and outputs of a block are replicated, so stages send the same tensors as without
tensor parallelism, on every schedule, and norms and routing are the same on all ranks.

Each expert is sharded like an MLP. A rank weights its part of an expert's output, and parts are reduced after all
experts of a token; gradients of tokens and routing weights are reduced where both enter the experts. In latent
attention, the projections to latents are replicated. The rotary part of the key is shared by all heads and bypasses
the sharded matrices, so its gradient is reduced where it is split off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from runner.models.family import Family
from runner.pipeline.chunk import StageChunk, layers_of

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


@runtime_checkable
class Planned(Family, Protocol):
    """A family that knows how its own modules are sharded."""

    def shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard what `build` returned, which is on the meta device, over the tensor-parallel ranks of a mesh."""
        ...

    def summed_over_heads(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """See `summed_over_heads` in this file."""
        ...


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
