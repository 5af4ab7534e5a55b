"""What travels between stages: its kind, shape and dtype, known before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from manifests.errors import InputError
from runner.families import Family

__all__ = ["Cargo", "Wire", "plan_wire"]

Cargo = Literal["tokens", "hidden", "logits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """The tensor before each stage and after the last: `cargo[s]` enters stage s and leaves stage s - 1.

    Shapes: tokens (B, L), hidden (B, L, D), logits (B, L, V); B = sequences, L = tokens.
    """

    cargo: tuple[Cargo, ...]
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype

    def example(self, boundary: int, batch: int, seq_len: int) -> torch.Tensor:
        """Give a tensor without memory that has the shape, dtype and grad of what crosses there."""
        cargo = self.cargo[boundary]
        if cargo == "tokens":
            return torch.empty(batch, seq_len, dtype=torch.int64, device="meta")
        width = self.hidden_size if cargo == "hidden" else self.vocab_size
        return torch.empty(batch, seq_len, width, dtype=self.dtype, device="meta", requires_grad=True)


def plan_wire(family: Family, stage_modules: Sequence[tuple[str, ...]], dtype: torch.dtype) -> Wire:
    """Give the wire of a pipeline whose stages hold these modules and compute in `dtype`.

    Raises:
        InputError: the stages together are not the model, each module once and in the order it runs.
    """
    listed = [module for modules in stage_modules for module in modules]
    for position, (expected, found) in enumerate(zip(family.modules, listed, strict=False)):
        if expected != found:
            raise InputError(
                "stages", f"expected {expected} as module {position} of {family.architecture}, found {found}"
            )
    if len(listed) != len(family.modules):
        raise InputError(
            "stages", f"expected {len(family.modules)} modules of {family.architecture}, found {len(listed)}"
        )
    first, last = family.modules[0], family.modules[-1]
    cargo: list[Cargo] = ["tokens"]
    for modules in stage_modules:
        arrived = "hidden" if first in modules else cargo[-1]
        cargo.append("logits" if last in modules else arrived)
    return Wire(cargo=tuple(cargo), hidden_size=family.hidden_size, vocab_size=family.vocab_size, dtype=dtype)
