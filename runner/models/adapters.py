"""LoRA adapters on transformers' modules, with the names and the arithmetic of peft.

# Note [Adapters]
An adapted linear module keeps its class and its names, and gets two modules besides, as wide as its rank: `lora_A` and
`lora_B`. A hook adds their product, so that `q_proj.lora_A.weight` is the name of a PEFT folder without its prefix.
Experts in one tensor, of all experts of a layer, get the product added to the tensor itself in each forward, as peft's
`ParamWrapper` does. Of two such tensors the first one's adapters are below `base_layer`, because peft wraps the module
once for each of them.

Source: peft 0.21.2, `tuners/lora/layer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from manifests.models.adapters import ALL_LINEAR, is_adapter, matches_target
from runner.config.lora import LoraOptions
from runner.config.trained import no_adapters
from runner.models.regions import Region

_FUSED = ("out_proj", "x_proj", "dt_proj")  # of Mamba's mixers: a kernel takes their weights, and no hook runs


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
        """Add adapters to the modules of a whole model that the options name; its head has none.

        Raises:
            UsageError: there are none, or one is of a module whose forward is not called.
        """
        everywhere = {path for path, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
        fused = {f"{path}.{leaf}" for path, module in model.named_modules() for leaf in _FUSED
                 if hasattr(module, "A_log") and hasattr(module, "D")}  # fmt: skip
        odd = [path for path in sorted(everywhere & fused) if matches_target(lora.target, path)]
        if odd and lora.target != ALL_LINEAR:
            raise no_adapters((odd[0],), type(model).__name__)
        linear = [path for path, _ in model.named_modules() if path in everywhere - fused - {head}
                  and matches_target(lora.target, path)]  # fmt: skip
        experts = {
            path: names
            for path, module in model.named_modules()
            if lora.experts
            and not isinstance(module, _ConvNd)
            and (names := tuple(name for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3))
        }
        if not linear and not experts:
            raise no_adapters(lora.target, type(model).__name__)
        leaves = tuple(sorted({path.rpartition(".")[2] for path in linear}))
        is_exact = {path for path in everywhere if matches_target(leaves, path)} == set(linear)
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
        """Check that each name of the target is that of an adapted module.

        Raises:
            UsageError: one is not.
        """
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
            module.register_forward_hook(partial(_add, scale))
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
            module.forward = partial(_with_experts, module, module.forward, holders, scale)


def _sizes(module: nn.Linear | Conv1D) -> tuple[int, int]:
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def _attach(holder: nn.Module, num_in: int, num_out: int, rank: int, like: torch.Tensor) -> None:
    holder.lora_A = nn.Linear(num_in, rank, bias=False, device=like.device, dtype=like.dtype)
    holder.lora_B = nn.Linear(rank, num_out, bias=False, device=like.device, dtype=like.dtype)
    nn.init.zeros_(holder.lora_B.weight)


def _add(scale: float, module: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
    given = module.lora_dropout(args[0].to(module.lora_A.weight.dtype))
    added: torch.Tensor = out + module.lora_B(module.lora_A(given)) * scale
    return added.to(out.dtype)


def _with_experts(
    module: Any, forward: Callable[..., Any], holders: Mapping[str, Any], scale: float, *args: Any, **kwargs: Any
) -> Any:
    """Run the forward of experts with the adapters' products added to their tensors."""
    weights = {name: module._parameters[name] for name in holders}
    try:
        for name, holder in holders.items():
            weight = weights[name]
            a, b = holder.lora_A.weight, holder.lora_B.weight
            a = a.reshape(len(weight), -1, a.shape[1])  # (experts, rank, in)
            b = b.reshape(b.shape[0], -1, len(weight)).permute(2, 0, 1)  # (experts, out, rank)
            if getattr(module, "is_transposed", False):
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            module._parameters[name] = torch.baddbmm(weight, b, a, alpha=scale)
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(weights)
