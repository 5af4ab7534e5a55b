"""What balances experts: checked by architecture before ranks start, and noted in the log. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from manifests.models.trainable import generic_entry
from runner.bundle.packed import Packed
from runner.config.balance import BalanceOptions
from runner.config.flags import TrainOptions, flag_of

_BIAS, _LOSS = flag_of("router_bias_rate"), flag_of("router_aux_loss")


def check_balance(launched: Packed, options: TrainOptions, *, is_dtype_final: bool = True) -> None:
    """Check that what is to balance the experts of a model can.

    Families of other packages are left to `runner.training.expert_balance`, which sees their routers.
    """
    architecture, balance = launched.shape.architecture, options.balance
    entry = generic_entry(architecture)
    if entry is None or launched.manifest.model.description is not None:
        return
    has_routers = has_experts(launched.shape.tensors)
    biases = {entry.router_bias} - {""} if has_routers else set[str]()
    if not is_dtype_final or options.compute.dtype != "bf16":
        biases = {bias.replace("bfloat16", "float32") for bias in biases}
    balance.check_routers(architecture, biases, takes_loss=entry.aux_loss and has_routers)


def has_experts(tensors: Iterable[str]) -> bool:
    return any("expert" in name or "moe" in name for name in tensors)


def expert_notes(
    tensors: Iterable[str], balance: BalanceOptions, run: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Return notes that nothing balances experts, for a model of these tensors that has some.

    `run` is the record of the run that is resumed, if there is one.
    """
    launches = (run or {}).get("launches")
    launches = launches[-2:] if isinstance(launches, list) else ()  # this one, and that before it
    options = [
        launch["options"] for launch in launches if isinstance(launch, dict) and isinstance(launch.get("options"), dict)
    ]
    ended = [
        f"{flag} {launched[name]} of the launch before is not given again: it no longer balances experts"
        for flag, name, value in (
            (_BIAS, "router_bias_rate", balance.bias_rate),
            (_LOSS, "router_aux_loss", balance.aux_loss),
        )
        for launched in options
        if not value and launched.get(name)
    ]
    if ended or balance.is_on or not has_experts(tensors := tuple(tensors)):
        return tuple(ended)
    note = "experts are not balanced: --router-aux-loss is 0, whatever router_aux_loss_coef of config.json is"
    if any(name.endswith("e_score_correction_bias") for name in tensors):
        note = (
            "experts are not balanced: --router-bias-rate is 0, so e_score_correction_bias of routers does not change"
        )
    return (note,)
