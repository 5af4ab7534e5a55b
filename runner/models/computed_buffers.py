"""Buffers that are in no file: models compute them when they are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn


def computed_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, part in model.named_modules():
        for leaf in part._non_persistent_buffers_set:
            if (buffer := part._buffers.get(leaf)) is not None:
                yield f"{name}.{leaf}".lstrip("."), buffer
        for leaf, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{leaf}".lstrip("."), value


def with_buffers_alone(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that is built on the CPU with its buffers computed, and its parameters on the meta device."""
    register = nn.Module.register_parameter

    def register_empty(part: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(part, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[assignment, method-assign]
    try:
        return build()
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
