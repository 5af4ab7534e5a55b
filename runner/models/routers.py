"""Routers of a stage: the modules that choose experts for tokens, and the biases that steer them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from runner.models.family import Family

_BIAS = "e_score_correction_bias"


@runtime_checkable
class Routed(Family, Protocol):
    """A family whose layers may have routers."""

    def routers(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the routers of what `build` returned by name; they have the attribute `num_experts`.

        A router returns the experts of each token, (…, K), in its only tensor of integers. The first tensor of a
        router of transformers is its logits (N, E), the second the weights of the chosen experts (N, K).
        """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Router:
    """A router of a layer; `bias` is a buffer, which the router or the module around it has."""

    layer: int
    module: nn.Module
    num_experts: int
    bias: torch.Tensor | None


def recorded_routers(model_class: Any, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of which a class of transformers records logits.

    Some return logits alone, or choose experts in a way of their own: those are left out.
    """
    recorded: Any = (getattr(model_class, "_can_record_outputs", None) or {}).get("router_logits")
    if getattr(recorded, "index", None) == 0:
        for name, part in module.named_modules():
            if isinstance(part, recorded.target_class) and hasattr(part, "num_experts"):
                yield name, part


def routers_of(family: Family, module: nn.Module) -> Iterator[Router]:
    """Yield the routers of what a family built."""
    return routers_among(family.routers(module) if isinstance(family, Routed) else (), module)


def routers_among(named: Iterable[tuple[str, nn.Module]], module: nn.Module) -> Iterator[Router]:
    """Yield these parts of a module as routers."""
    for name, part in named:
        around = module.get_submodule(name.rpartition(".")[0])
        buffers = [*part.named_buffers(recurse=False), *around.named_buffers(recurse=False)]
        bias = next((buffer for leaf, buffer in buffers if leaf == _BIAS), None)
        number = re.search(r"\.(\d+)\.", name)
        assert number, name
        yield Router(
            layer=int(number[1]),
            module=part,
            num_experts=part.num_experts if bias is None else len(bias),  # type: ignore[arg-type]  # with those of no weights
            bias=bias,
        )
