"""How a run keeps the load of experts even."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from manifests.errors import UsageError
from runner.config.declared import Number, flag


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceOptions:
    """What acts on routers besides the loss; see `runner.training.expert_balance`."""

    bias_rate: float = flag(
        "--router-bias-rate", type=Number(min=0), default=0.0, metavar="RATE",
        help="Move e_score_correction_bias of routers by this after every step, up for experts with fewer tokens than "
        "the mean; DeepSeek-V3 was trained with 0.001.",
    )  # fmt: skip
    aux_loss: float = flag(
        "--router-aux-loss", type=Number(min=0), default=0.0, metavar="COEF",
        help="Coefficient of the auxiliary load-balancing loss (router_aux_loss_coef of config.json).",
    )  # fmt: skip

    @property
    def is_on(self) -> bool:
        return bool(self.bias_rate or self.aux_loss)

    def check_routers(self, architecture: str, biases: Collection[str], *, takes_loss: bool) -> None:
        """Check that this can balance routers with biases of these dtypes, or with a loss."""
        bias, loss, problem = "--router-bias-rate", "--router-aux-loss", f"is not supported for {architecture}: "
        if self.bias_rate and not biases:
            where, hint = bias, f"use {loss}" if takes_loss else "leave it out"
            problem += "its routers have no e_score_correction_bias that is a buffer"
        elif self.bias_rate and "bfloat16" in biases:
            where, hint = bias, "use --dtype fp32"
            problem = f"is lost in rounding: {architecture} has its biases in bfloat16"
        elif self.aux_loss and not takes_loss:
            where, hint = loss, f"use {bias}" if biases else "leave it out"
            problem += "no router of it is known to add such a loss"
        else:
            return
        raise UsageError(where, problem, hint, code="options.router")
