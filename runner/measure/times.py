"""The seconds of a module. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSeconds:
    """What one microbatch takes in a module, in seconds."""

    forward_s: float
    backward_s: float

    @property
    def total(self) -> float:
        return self.forward_s + self.backward_s
