"""Which loss a run trains with, and how it keeps the load of experts even."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from manifests.errors import UsageError
from runner.config.declared import Number, flag

MTP_WEIGHT = 0.1  # Megatron-Core's default
LOSSES = "runner.losses"  # the entry points of losses


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """The loss: cross-entropy, with what is built in beside it, or a function of an installed package."""

    entry_point: str | None = flag(
        "--loss", "own_loss", default=None, metavar="NAME", show_default="cross-entropy",
        help=f"Loss of an installed package (entry points of {LOSSES}), for training and evaluation.",
    )  # fmt: skip
    label_smoothing: float = flag(
        "--label-smoothing", type=Number(0, 1, max_open=True), default=0.0, help="Label smoothing in training."
    )
    z_loss: float = flag(
        "--z-loss",
        type=Number(min=0),
        default=0.0,
        help="Weight of the squared log-sum-exp of logits in the training loss.",
    )
    token_weights: str | None = flag(
        "--token-weights", default=None, metavar="FIELD", show_default="1 each",
        help="Field of rows with a weight for each token: the training loss is the weighted mean.",
    )  # fmt: skip
    mtp_weight: float = flag(
        "--mtp-loss-weight", "mtp_loss_weight", type=Number(min=0), default=MTP_WEIGHT,
        help="Weight of the mean loss of multi-token prediction (MTP) layers, if the model has some.",
    )  # fmt: skip

    @property
    def is_own(self) -> bool:
        """Whether it is not plain cross-entropy."""
        return bool(self.entry_point or self.label_smoothing or self.z_loss or self.token_weights)

    def __post_init__(self) -> None:
        built_in = {
            "--label-smoothing": self.label_smoothing, "--z-loss": self.z_loss,
            "--token-weights": self.token_weights is not None,
        }  # fmt: skip
        for name, is_set in built_in.items():
            if is_set and self.entry_point is not None:
                raise UsageError(name, "conflicts with --loss", "remove one of them", code="options.loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceOptions:
    """What acts on routers besides the loss; see `runner.training.expert_balance`."""

    bias_rate: float = flag(
        "--router-bias-rate", type=Number(min=0), default=0.0, metavar="RATE",
        show_default="0; for new weights, of reshard pack --init, 0.001 as DeepSeek-V3",
        help="Move e_score_correction_bias of routers by this after every step, up for experts with fewer tokens than "
        "the mean.",
    )  # fmt: skip
    aux_loss: float = flag(
        "--router-aux-loss", type=Number(min=0), default=0.0, metavar="COEF",
        help="Coefficient of the auxiliary load-balancing loss; router_aux_loss_coef of config.json has no effect.",
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
