"""`adapter_config.json` of a PEFT folder: what of LoRA is supported, and what is refused by name. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manifests.errors import SourceError
from manifests.jsontext import parse_config
from manifests.models.adapters import ALL_LINEAR, Target

_KINDS = {"use_dora": "DoRA", "use_qalora": "QA-LoRA", "lora_bias": "biases of adapters", "arrow_config": "Arrow",
          "layer_replication": "replicated layers", "alora_invocation_tokens": "activated LoRA",
          "trainable_token_indices": "trained tokens", "kasa_config": "KaSA", "use_bdlora": "block-diagonal LoRA",
          "monteclora_config": "MonteCLoRA", "velora_config": "VeLoRA"}  # fmt: skip
# Others than these change the base's weights, or what the adapter is relative to.
_INITIAL = (True, False, "gaussian", "eva")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """A LoRA adapter as peft describes it; `target` and `parameters` select what it adapts."""

    rank: int
    alpha: float
    target: Target
    parameters: tuple[str, ...] = ()
    is_rank_scaled: bool = False
    dropout: float = 0.0
    ranks: Mapping[str, int] = field(default_factory=dict)  # of modules that match a pattern
    alphas: Mapping[str, float] = field(default_factory=dict)
    saved: tuple[str, ...] = ()  # modules that are replaced as a whole

    def scale_of(self, module: str, rank: int) -> float:
        """Return what the product of a module's adapter is multiplied by; `rank` is that of its tensors."""
        alpha: float = _find(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_scaled else rank)

    def rank_of(self, module: str) -> int:
        rank: int = _find(self.ranks, module, self.rank)
        return rank


def parse_peft_config(text: bytes, where: str) -> PeftConfig:
    """Parse the config of a LoRA adapter."""
    fields = parse_config(text, where)
    if fields.get("peft_type") != "LORA":
        raise _unsupported(f"{where}: peft_type", f"{fields.get('peft_type')!r} adapters are not supported")
    for name, kind in _KINDS.items():
        if fields.get(name):
            raise _unsupported(f"{where}: {name}", f"{kind} is not supported")
    if (bias := fields.get("bias", "none")) != "none":
        raise _unsupported(f"{where}: bias", f"trained biases ({bias!r}) are not supported")
    if (initial := fields.get("init_lora_weights", True)) not in _INITIAL:
        problem = f"{initial!r} changes the base, so that the adapter is not relative to the original weights"
        raise _unsupported(f"{where}: init_lora_weights", problem)
    target: Any = fields.get("target_modules") or ()
    if not isinstance(target, str):
        target = tuple(_list(fields, "target_modules", where))
    elif target != ALL_LINEAR:
        _check_pattern(target, f"{where}: target_modules")
    patterns = {name: fields.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    for name, pattern in patterns.items():
        is_rank = name == "rank_pattern"
        if not isinstance(pattern, dict) or not all(_is_number(value, is_rank) for value in pattern.values()):
            raise _invalid(f"{where}: {name}", "an object of numbers", pattern)
        for key in pattern:
            _check_pattern(key, f"{where}: {name}")
    return PeftConfig(
        rank=int(_number(fields, "r", where, least=1, is_rank=True)),
        alpha=_number(fields, "lora_alpha", where),
        target=target,
        parameters=tuple(_list(fields, "target_parameters", where)),
        is_rank_scaled=bool(fields.get("use_rslora")),
        dropout=_number(fields, "lora_dropout", where, default=0.0),
        ranks={key: int(value) for key, value in patterns["rank_pattern"].items()},
        alphas=patterns["alpha_pattern"],
        saved=tuple(_list(fields, "modules_to_save", where)),
    )


def _find(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Source: peft 0.21.2, `get_pattern_key`."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _number(
    fields: Mapping[str, Any], name: str, where: str, *, least: float = 0, default: Any = None, is_rank: bool = False
) -> float:
    value = fields.get(name, default)
    if not _is_number(value, is_rank) or value < least:
        raise _invalid(f"{where}: {name}", f"a {'whole ' * is_rank}number >= {least}", value)
    return float(value)


def _list(fields: Mapping[str, Any], name: str, where: str) -> list[str]:
    value = fields.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _invalid(f"{where}: {name}", "a list of names", value)
    return value


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise _invalid(where, "a regular expression", pattern) from error


def _is_number(value: object, is_rank: bool = False) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return not is_rank or (value >= 1 and value == int(value))


def _invalid(where: str, expected: str, value: object) -> SourceError:
    return SourceError(where, f"expected {expected}, found {str(value)[:80]!r}", code="source.bad-adapter")


def _unsupported(where: str, problem: str) -> SourceError:
    hint = "merge it with peft's merge_and_unload"
    return SourceError(where, problem, hint, code="source.adapter-kind")
