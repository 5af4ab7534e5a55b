"""LoRA adapters on transformers' modules, with the names and the arithmetic of peft.

# Note [Adapters]
An adapted linear module keeps its class and its names, and gets two modules besides, as wide as its rank: `lora_A` and
`lora_B`. Its forward adds their product: `q_proj.lora_A.weight` is the name of a PEFT folder without its prefix.
Experts in one tensor, of all experts of a layer, get the product added to the tensor itself in each forward, as peft's
`ParamWrapper` does. Of two such tensors the first one's adapters are below `base_layer`, because peft wraps the module
once for each of them.

Every rank has whole adapters of the weights that `--tp` and `--ep` shard, and multiplies the rows of B and the columns
of A that its part of the weight needs: gradients of both are sums over these ranks (`sharded_adapters`).

Source: peft 0.21.2, `tuners/lora/layer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from manifests.models.adapters import ALL_LINEAR, is_adapter, matches_target, names_of
from runner.config.lora import LoraOptions
from runner.config.trained import no_adapters
from runner.models.regions import Region
from runner.tensors.dtensor import local_regions

_FUSED = ("out_proj", "x_proj", "dt_proj")  # of Mamba's mixers: a kernel takes their weights, and no hook runs
_PLAIN = "FalconLinear"  # its own forward is a plain product; importing its module imports transformers twice


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """Where a model has adapters, by the names of its modules: linear ones, and those of experts with their tensors."""

    lora: LoraOptions
    linear: tuple[str, ...]
    experts: Mapping[str, tuple[str, ...]]
    target: tuple[str, ...]  # names that select these linear modules and no others
    is_transposed: bool  # whether linear modules have weights (in, out), as GPT-2's
    base: tuple[str, ...]  # what has adapters, as files name it
    tensors: Mapping[str, Region] = field(default_factory=dict)  # adapters as files have them, by their names in memory

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The adapters' shapes by their names in files."""
        return {region.fqn: region.shape for region in self.tensors.values()}

    @property
    def parameters(self) -> tuple[str, ...]:
        """The ends of the names of adapted experts."""
        ends = (f"{path.rpartition('.')[2]}.{name}" for path, names in self.experts.items() for name in names)
        return tuple(dict.fromkeys(ends))

    @classmethod
    def find(
        cls,
        model: nn.Module,
        lora: LoraOptions,
        head: str,
        regions: Mapping[str, tuple[Region, ...]],
        in_files: Callable[[str], str],
    ) -> Adapters:
        """Add adapters to the modules of a whole model that the options name; its head has none."""
        # Classes with a forward of their own may have several outputs (routers), or weights of several matrices.
        plain = (nn.Linear.forward, Conv1D.forward)
        kinds = ((path, type(module)) for path, module in model.named_modules())
        everywhere = {path for path, kind in kinds if kind.forward in plain or kind.__name__ == _PLAIN}
        fused = {f"{path}.{leaf}" for path, module in model.named_modules() for leaf in _FUSED
                 if hasattr(module, "A_log") and hasattr(module, "D")}  # fmt: skip
        odd = [path for path in sorted(everywhere & fused) if matches_target(lora.target, path)]
        if odd and names_of(lora.target) != ALL_LINEAR:
            raise no_adapters((odd[0],), type(model).__name__)
        linear = [path for path, _ in model.named_modules() if path in everywhere - fused - {head}
                  and matches_target(lora.target, path)]  # fmt: skip
        experts = {
            path: names for path, module in model.named_modules() if lora.experts and (names := _stacks_of(module))
        }
        if not linear and not experts:
            raise no_adapters(lora.target, type(model).__name__)
        leaves = tuple(sorted({path.rpartition(".")[2] for path in linear}))
        is_exact = {path for path, _ in model.named_modules() if matches_target(leaves, path)} == set(linear)
        names = (
            *(f"{path}.weight" for path in linear),
            *(f"{path}.{name}" for path in experts for name in experts[path]),
        )
        adapters = cls(
            lora=lora,
            linear=tuple(linear),
            experts=experts,
            target=leaves if is_exact else tuple(map(in_files, linear)),
            base=tuple(region.fqn for name in names for region in regions[name]),
            is_transposed=any(isinstance(model.get_submodule(path), Conv1D) for path in linear),
        )
        adapters.add_to(model)
        tensors = {}
        for name, weight in model.named_parameters():
            if is_adapter(name):
                shape = tuple(weight.shape)
                tensors[name] = Region(fqn=in_files(name), shape=shape, corner=(0, 0), sizes=shape, dims=(0, 1))
        return replace(adapters, tensors=tensors)

    def check_names(self, architecture: str) -> None:
        """Check that each name of the target is that of an adapted module."""
        for name in self.lora.target if isinstance(self.lora.target, tuple) else ():
            if not any(matches_target((name,), path) for path in self.linear):
                raise no_adapters((name,), architecture)

    def add_to(self, model: nn.Module) -> None:
        """Add adapters to the modules of a whole model."""
        rank, scale = self.lora.rank, self.lora.scale
        for path in self.linear:
            module: Any = model.get_submodule(path)
            _attach(module, *_sizes(module), rank, module.weight)
            module.lora_dropout = nn.Dropout(self.lora.dropout)
            module.lora_holders = {"weight": module}
            module.forward = partial(_with_product, module, module.forward, scale)
        for path, names in self.experts.items():
            module = holder = model.get_submodule(path)
            holders: dict[str, Any] = {}
            for name in reversed(names):
                holders[name], weight = holder, module.get_parameter(name)
                num_experts, num_in, num_out = weight.shape
                if not getattr(module, "is_transposed", False):
                    num_in, num_out = num_out, num_in
                _attach(holder, num_in, num_out, rank * num_experts, weight)
                if name != names[0]:
                    holder.base_layer = nn.Module()
                    holder = holder.base_layer
            module.lora_holders = holders
            module.forward = partial(_with_experts, module, module.forward, rank, scale)


def _stacks_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's tensors that have the matrices of all experts of a layer."""
    weights = () if isinstance(module, _ConvNd) else module.named_parameters(recurse=False)
    return tuple(name for name, weight in weights if weight.dim() == 3 and len(weight) > 1)


def _sizes(module: nn.Linear | Conv1D) -> tuple[int, int]:
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def _attach(holder: nn.Module, num_in: int, num_out: int, rank: int, like: torch.Tensor) -> None:
    holder.lora_A = nn.Linear(num_in, rank, bias=False, device=like.device, dtype=like.dtype)
    holder.lora_B = nn.Linear(rank, num_out, bias=False, device=like.device, dtype=like.dtype)
    nn.init.zeros_(holder.lora_B.weight)


def split_adapters(model: nn.Module) -> None:
    """Note which part of each adapted weight this rank has, once the weights are sharded."""
    for module in model.modules():
        for name, holder in getattr(module, "lora_holders", {}).items():
            weight = module.get_parameter(name)
            if isinstance(weight, DTensor):
                parts = [tuple(zip(offset, part.shape, strict=True)) for part, offset in local_regions(weight)]
                holder.lora_parts = [tuple(dict.fromkeys(ranges)) for ranges in zip(*parts, strict=True)]


def sharded_adapters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the adapters whose gradients on a rank cover only its own part of a weight."""
    holders: list[Any] = [module for module in model.modules() if hasattr(module, "lora_parts")]
    for holder in holders:
        yield from (holder.lora_A.weight, holder.lora_B.weight)


def _take(matrix: torch.Tensor, holder: Any, of_weight: int, dim: int) -> torch.Tensor:
    """Return what this rank needs of a dimension of an adapter; `of_weight` is the weight's."""
    if not hasattr(holder, "lora_parts"):
        return matrix
    parts = [matrix.narrow(dim, first, size) for first, size in holder.lora_parts[of_weight]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _with_product(module: Any, forward: Callable[..., Any], scale: float, value: torch.Tensor) -> Any:
    """Run the forward of a linear module, and add the product of its adapter."""
    out, local = forward(value), value
    if isinstance(value, DTensor):
        local = value.to_local(grad_placements=[Partial() if place.is_replicate() else place
                                                for place in value.placements])  # fmt: skip
    is_turned = isinstance(module, Conv1D)
    a = _take(module.lora_A.weight, module, 0 if is_turned else 1, 1)
    b = _take(module.lora_B.weight, module, 1 if is_turned else 0, 0)
    added = F.linear(F.linear(module.lora_dropout(local.to(a.dtype)), a), b) * scale
    if isinstance(value, DTensor):
        places = out.placements if value.placements[0].is_replicate() else (Partial(),)
        added = DTensor.from_local(added, out.device_mesh, places, run_check=False)
    return (out + added).to(out.dtype)


def _with_experts(module: Any, forward: Callable[..., Any], rank: int, scale: float, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of experts with the adapters' products added to their tensors."""
    weights = {name: module._parameters[name] for name in module.lora_holders}
    is_turned = getattr(module, "is_transposed", False)
    try:
        for name, holder in module.lora_holders.items():
            for part in (holder.lora_A, holder.lora_B):
                if isinstance(part, FSDPModule):
                    part.unshard()
            a, b = holder.lora_A.weight, holder.lora_B.weight
            a = a.reshape(-1, rank, a.shape[1])  # (experts, rank, in)
            b = b.reshape(b.shape[0], rank, -1).permute(2, 0, 1)  # (experts, out, rank)
            a = _take(_take(a, holder, 0, 0), holder, 1 if is_turned else 2, 2)
            b = _take(_take(b, holder, 0, 0), holder, 2 if is_turned else 1, 1)
            if is_turned:
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            module._parameters[name] = torch.baddbmm(weights[name], b, a, alpha=scale)
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(weights)
