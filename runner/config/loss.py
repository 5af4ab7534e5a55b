"""Which loss a run trains with."""

from __future__ import annotations

from dataclasses import dataclass

from manifests.errors import UsageError
from runner.config.declared import Number, flag

LOSSES = "runner.losses"  # the entry points of losses


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """The loss: cross-entropy, with what is built in beside it, or a function of an installed package.

    Raises:
        UsageError: a value out of range, or both.
    """

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

    def __post_init__(self) -> None:
        built_in = {
            "--label-smoothing": self.label_smoothing, "--z-loss": self.z_loss,
            "--token-weights": self.token_weights is not None,
        }  # fmt: skip
        for name, is_set in built_in.items():
            if is_set and self.entry_point is not None:
                raise UsageError(name, "conflicts with --loss", "remove one of them", code="options.loss")
