"""AdamW over one rank's parameters, with a learning rate that is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from manifests.schema import MOMENTS, Holds
from runner.chunk import NamedParameter
from runner.recipe import OptimOptions

__all__ = ["Optimizer", "lr_at"]


class Optimizer:
    """AdamW that steps each parameter once; `parameters` pairs each with its Hugging Face FQN.

    The moments are there from the start, as zeros, so that a checkpoint can be read into them.
    """

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
            for _, parameter in parameters:
                zeros = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
                self.adamw.state[parameter] = {"step": torch.tensor(0.0), **zeros}

    def moment(self, parameter: torch.nn.Parameter, moment: Holds) -> torch.Tensor:
        """Give what AdamW keeps of a parameter's gradients, which it changes in place."""
        assert self.adamw is not None
        kept: torch.Tensor = self.adamw.state[parameter][moment]
        return kept

    def resume(self, num_steps: int) -> None:
        """Go on as after so many steps; the moments have been filled."""
        for _, parameter in self.parameters:
            assert self.adamw is not None
            self.adamw.state[parameter]["step"].fill_(num_steps)

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
