"""AdamW over one rank's parameters, and the learning-rate schedule: a pure function of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from manifests.schedules.learning_rate import rate_at
from manifests.schema import MOMENTS, Holds
from runner.config.schema import OptimOptions
from runner.pipeline.chunk import NamedParameter
from runner.training.mixed_precision import master_of, round_masters, zero_gradient


class Optimizer:
    """AdamW that steps each parameter once; `parameters` pairs each with its Hugging Face FQN.

    The optimizer state exists from the start, as zeros, so that a checkpoint can be loaded into it.
    """

    def __init__(self, parameters: Sequence[NamedParameter], options: OptimOptions) -> None:
        self.parameters, self.options = tuple(parameters), options
        self._stepped = {id(parameter) for _, parameter in parameters}
        self.adamw: torch.optim.AdamW | None = None
        if parameters:  # torch refuses an empty list; a stage may have no parameters
            weights = [master_of(parameter) for _, parameter in parameters]
            is_fused = all(weight.is_cuda for weight in weights)
            bare = [not options.weight_decay_1d and parameter.dim() == 1 for _, parameter in parameters]
            groups: list[dict[str, Any]] = [
                {
                    "params": [weight for weight, without in zip(weights, bare, strict=True) if without is is_bare],
                    "weight_decay": 0.0 if is_bare else options.weight_decay,
                }
                for is_bare in (False, True)
            ]
            self.adamw = torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=options.lr,
                betas=options.betas,
                eps=options.eps,
                fused=is_fused or None,  # None: torch's choice, on the CPU one weight at a time
            )
            for weight in weights:
                zeros = {moment: torch.zeros_like(weight) for moment in MOMENTS}
                step = torch.zeros((), device=weight.device if is_fused else "cpu")
                self.adamw.state[weight] = {"step": step, **zeros}

    def steps(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this optimizer steps a parameter: of tied ones on a rank, it steps the first."""
        return id(parameter) in self._stepped

    def moment(self, parameter: torch.nn.Parameter, moment: Holds) -> torch.Tensor:
        """Return AdamW's `exp_avg` or `exp_avg_sq` of a parameter, which it updates in place."""
        assert self.adamw is not None
        state: torch.Tensor = self.adamw.state[master_of(parameter)][moment]
        return state

    def resume(self, num_steps: int) -> None:
        """Set the step count, after the optimizer state was loaded."""
        for _, parameter in self.parameters:
            assert self.adamw is not None
            self.adamw.state[master_of(parameter)]["step"].fill_(num_steps)

    def zero_gradients(self) -> None:
        for _, parameter in self.parameters:
            zero_gradient(parameter)

    def step(self, step: int) -> float:
        """Take optimizer step number `step`, the first being 0, and return its learning rate."""
        lr = lr_at(step, self.options)
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            for _, parameter in self.parameters:
                # One that is not trained, such as a router's bias in some models, does not decay either.
                master_of(parameter).grad = parameter.grad if parameter.requires_grad else None
            self.adamw.step()
            round_masters(parameter for _, parameter in self.parameters)
        return lr


def lr_at(step: int, options: OptimOptions) -> float:
    """Return the learning rate of a step, the first being 0."""
    return rate_at(step, options.schedule)
