"""How a run keeps the load of experts even."""

from __future__ import annotations

from dataclasses import dataclass

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
