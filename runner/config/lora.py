"""The options of LoRA adapters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manifests.errors import UsageError
from manifests.models.adapters import ALL_LINEAR, PEFT_CONFIG, Target, parse_peft_config, parse_target
from manifests.store import read_small_file
from runner.config.declared import Number, WholeNumber, flag


def _read_target(text: str) -> Target:
    try:
        return parse_target(text)
    except re.error as error:
        raise UsageError(
            f"--lora-target {text}",
            f"expected names such as q_proj,v_proj, {ALL_LINEAR} or a regular expression: {error}",
            code="options.invalid-value",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """LoRA adapters: their rank and scale, and the modules that get them."""

    rank: int = flag(
        "--lora-rank", type=WholeNumber(min=1), metavar="R",
        help="Train LoRA adapters of this rank beside frozen weights; --save writes a PEFT folder.",
    )  # fmt: skip
    alpha: float = flag(
        "--lora-alpha", type=Number(min=0), metavar="A", show_default="--lora-rank",
        help="Scale of adapters: their product is multiplied by A / R.",
    )  # fmt: skip
    target: Target = flag(
        "--lora-target", metavar="NAMES|REGEX", written_default=ALL_LINEAR, read=_read_target,
        help=f"Linear modules that get adapters: the ends of their names, such as q_proj,v_proj, a regular expression "
        f"of whole names, or {ALL_LINEAR}, which leaves out the head.",
    )  # fmt: skip
    experts: bool = flag(
        "--lora-experts", is_flag=True, written_default=False,
        help="Also add adapters to experts that are stored in one tensor, beside linear modules.",
    )  # fmt: skip
    dropout: float = flag(
        "--lora-dropout", type=Number(0, 1, max_open=True), written_default=0.0,
        help="Dropout in front of adapters.",
    )  # fmt: skip
    is_rank_scaled: bool = flag(
        "--lora-rslora", is_flag=True, written_default=False,
        help="Multiply the product by A / sqrt(R) instead (rsLoRA).",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.experts and self.dropout:
            raise UsageError(
                "--lora-dropout",
                "conflicts with --lora-experts, whose adapters are added to the experts' weights",
                "remove one of them",
                code="options.conflict",
            )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.is_rank_scaled else self.rank)


# Flags of adapters besides their rank.
WITH_RANK = ("lora_alpha", "lora_target", "lora_experts", "lora_dropout", "lora_rslora")


def check_adapters(values: Mapping[str, Any]) -> None:
    """Refuse flags that conflict with adapters."""
    adapter = "--lora-rank" if values["lora_rank"] is not None else "--lora-from" if values["adapter"] else None
    if adapter and values["publish"]:
        problem = f"conflicts with {adapter}: whole weights are published, and adapters are apart"
        hint = "reshard merge BASE ADAPTER --out DIR, then reshard delta publish DIR --chain CHAIN"
        raise UsageError("--publish", problem, hint, code="options.conflict")
    if adapter and values["train_only"]:
        problem, hint = f"conflicts with {adapter}, which trains adapters alone", "remove one of them"
        raise UsageError("--train-only", problem, hint, code="options.conflict")
    for name in ("lora_rank", *WITH_RANK) if values["adapter"] else ():
        if values[name] not in (None, False, 0, ALL_LINEAR):
            problem, hint = "conflicts with --lora-from, whose folder has it", "remove one of them"
            raise UsageError(f"--{name.replace('_', '-')}", problem, hint, code="options.conflict")


def check_dropout(lora: LoraOptions | None, folder: Path | None) -> None:
    """Refuse dropout of adapters on tensor-parallel ranks. `folder`: the one that they are read from."""
    if lora is None or not lora.dropout:
        return
    where, what, hint = "--lora-dropout", "", "remove --tp, or start a new run without --lora-dropout"
    if folder is not None:
        where, what = f"--lora-from {folder}", f"lora_dropout of {PEFT_CONFIG} "
        hint = f"remove --tp, or start a new run with a lora_dropout of 0 in {PEFT_CONFIG}"
    problem = "conflicts with --tp, whose ranks would draw the same random numbers for different parts of a matrix"
    raise UsageError(where, what + problem, hint, code="options.conflict")


def read_lora(folder: Path) -> LoraOptions:
    """Return the options of a run that trains the adapters of a PEFT folder."""
    path = folder / PEFT_CONFIG
    config = parse_peft_config(read_small_file(path), str(path))
    others = {"rank_pattern": config.ranks, "alpha_pattern": config.alphas, "modules_to_save": config.saved}
    for name, value in others.items():
        if value:
            problem, hint = f"{name} of {PEFT_CONFIG} is not supported in training", "merge it first: reshard merge"
            raise UsageError(f"--lora-from {folder}", problem, hint, code="source.adapter-kind")
    return LoraOptions(
        rank=config.rank, alpha=config.alpha, target=config.target or (), experts=bool(config.parameters),
        dropout=config.dropout, is_rank_scaled=config.is_rank_scaled,
    )  # fmt: skip
