"""Optimizers of another package: one works on any slice, others say so and do not, or take other tensors."""

from __future__ import annotations

from typing import Any

import torch


class Signs(torch.optim.Optimizer):
    """Step against the sign of a momentum that begins at zero."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def direction(self, momentum: torch.Tensor) -> torch.Tensor:
        return momentum.sign()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    momentum = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                    momentum.lerp_(weight.grad, 1 - group["momentum"])
                    weight.add_(self.direction(momentum), alpha=-group["lr"])


class Relative(Signs):
    """Step by the share of the rate it is constructed with, as decoupled decay of lion_pytorch and AdaBound do."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        self.first = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.mul_(1 - 0.1 * group["lr"] / self.first)


class Normed(Signs):
    """Step along a momentum that is divided by its norm, which no slice knows."""

    def direction(self, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / (momentum.norm() + 1e-8)


class RowNormed(Signs):
    """Step along a momentum of which each row is divided by its norm: slices of rows would not tell."""

    def direction(self, momentum: torch.Tensor) -> torch.Tensor:
        return momentum / (momentum.norm(dim=-1, keepdim=True) + 1e-8) if momentum.dim() > 1 else momentum.sign()


class Counting(Signs):
    """Count steps of all parameters together, as many packages do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


class CountingItself(Signs):
    """Count steps of all parameters together in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.count += 1


class MatricesAlone(Signs):
    """Take matrices, and say so of others with an assertion."""

    def direction(self, momentum: torch.Tensor) -> torch.Tensor:
        assert momentum.dim() == 2
        return momentum.sign()


class MatricesWithNorms(MatricesAlone):
    """Keep the norm of each matrix's momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["norm"] = state["velocity"].norm()


class Renamed(Signs):
    """Keep state by a name that no file can have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["Velocity"] = state["velocity"].clone()


class Splitting(Signs):
    """Split its parameters into groups."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        self.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
