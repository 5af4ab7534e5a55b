"""Matrices cut over tensor-parallel ranks, those of attention, MLPs and experts.

# Note [Tensor parallelism]
Matrices are cut as in Megatron: those that begin a block by rows, so that each rank has whole heads or hidden
units, those that end it by columns. What goes in and comes out is whole on every rank, so stages hand on what
they hand on without it, on every schedule, and norms and the choice of experts are the same everywhere.

Each expert is cut as an MLP is. A rank weighs its part of an expert's output, and parts are added up once all
experts of a token are; gradients of a token, and of its weights for experts, are added up where both go in.
Of latent attention, what leads to latents is whole on every rank. The key's rotary part is of all heads and goes
by no matrix that is cut, so its gradient is added up where it is split off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from runner.pipeline.chunk import StageChunk, layers_of

__all__ = ["cut_matrices", "summed_over_heads"]

_COLWISE, _ROWWISE, _WHOLE = "colwise", "rowwise", "whole"
# Every linear map of a layer, by its last two names; both ways to a rank's own heads or units.
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
# Every parameter of all experts of a layer: the dimension of hidden units; None: it has none.
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
# Of each head, and the same for all of them: a rank has seen its own heads alone.
_OF_HEADS = ("q_norm", "k_norm")


def cut_matrices(chunk: StageChunk, mesh: DeviceMesh) -> None:
    """Let this rank hold its part of every matrix of a chunk, which is on the meta device."""
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
    """Give the parameters whose gradients on each rank are those of its own heads, to be added up."""
    for _, layer in layers_of(chunk):
        attention = layer.get_submodule("attention")
        if hasattr(attention, _LATENT):  # its norms are of latents, which every rank has whole
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
    """torchtitan's embedding with its rows cut: given a group, it embeds the tokens that are in its own rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        module.tp_group = device_mesh.get_group()  # type: ignore[assignment]
        if (
            module.padding_idx is not None
        ):  # of the whole vocabulary; torchtitan looks up a rank's own rows by their place
            rows = module.num_embeddings // device_mesh.size()
            rank, place = divmod(module.padding_idx, rows)
            module.padding_idx = place if rank == device_mesh.get_local_rank() else None
        _place(module, "weight", device_mesh, Shard(0))
        module.register_forward_hook(lambda _, args, out: _summed(out, device_mesh))
        return module


class _LatentParallel(ParallelStyle):
    """Latent attention whose heads share the rotary part of the key."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank = getattr(module, _LATENT)

        def split_off(_: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
            return torch.cat([out[..., :rank], _summed_backwards(out[..., rank:], device_mesh)], dim=-1)

        module.get_submodule("wkv_a").register_forward_hook(split_off)
        return module


class _SinksParallel(ParallelStyle):
    """Attention that has a sink for each of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _place(module, "sinks", device_mesh, Shard(0))
        return module


class _ExpertParallel(ParallelStyle):
    """Experts each of which has its hidden units cut; see Note [Tensor parallelism]."""

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
    """Add up what ranks have parts of; each gets the whole gradient."""
    whole: torch.Tensor = DTensor.from_local(partial, mesh, (Partial(),)).redistribute(mesh, (Replicate(),)).to_local()
    return whole


def _summed_backwards(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Give what all ranks have, as it is; the gradients that they have parts of are added up."""
    same: torch.Tensor = DTensor.from_local(whole, mesh, (Replicate(),), run_check=False).to_local(
        grad_placements=(Partial(),)
    )
    return same
