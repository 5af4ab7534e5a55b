"""AdamW over one rank's parameters, with a learning rate that is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from runner.chunk import NamedParameter
from runner.recipe import OptimOptions

__all__ = ["Optimizer", "lr_at"]


class Optimizer:
    """AdamW that steps each parameter once; `parameters` pairs each with its Hugging Face FQN."""

    def __init__(self, parameters: Sequence[NamedParameter], options: OptimOptions) -> None:
        self.parameters, self.options = tuple(parameters), options
        self.adamw: torch.optim.AdamW | None = None
        if parameters:  # torch refuses an empty list; a stage may hold nothing
            self.adamw = torch.optim.AdamW(
                [parameter for _, parameter in parameters],
                lr=options.lr,
                betas=options.betas,
                eps=options.eps,
                weight_decay=options.weight_decay,
            )

    def zero_gradients(self) -> None:
        for _, parameter in self.parameters:
            parameter.grad = None

    def step(self, step: int) -> float:
        """Take optimizer step number `step`, the first being 0, and give its learning rate."""
        lr = lr_at(step, self.options)
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        return lr


def lr_at(step: int, options: OptimOptions) -> float:
    """Give the learning rate of a step, the first being 0."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    if options.decay == "constant":
        return options.lr
    done = min(1.0, (step - options.warmup_steps) / (options.decay_steps - options.warmup_steps))
    return options.min_lr + (options.lr - options.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
