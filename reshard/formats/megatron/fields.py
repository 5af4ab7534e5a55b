"""The fields of a config.json that say what Megatron-Core must compute; some of their values it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manifests.errors import ModelError
from manifests.models import ConfigReader


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embeddings: their type and base, and the other fields that a config has of them."""

    kind: str
    base: float
    fields: Mapping[str, Any]


class ConfigFields:
    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where
        self.typed = ConfigReader(config, f"{where}: config.json")

    def expect(self, name: str, allowed: object) -> None:
        """Raise unless a field is absent, or has the one value that Megatron's models compute."""
        found = self.config.get(name, allowed)
        if found != allowed:
            raise self.refuse(name, allowed, found)

    def refuse(self, name: str, allowed: object, found: object) -> ModelError:
        problem = f"Megatron-Core's model expects {allowed}, found {str(found)[:80]}"
        hint = "convert it with Megatron-Bridge, if it knows this model"
        return ModelError(f"{self.where}: config.json: {name}", problem, hint, code="model.not-in-megatron")

    def rope(self) -> Rope:
        """Return the rotary embeddings, which transformers 5 has in `rope_parameters`, 4 in two fields.

        Raises:
            InputError: they are not an object.
        """
        sections = map(self.typed.section, ("rope_parameters", "rope_scaling"))
        found = (section.config for section in sections if section is not None and section.config)
        fields: Mapping[str, Any] = next(found, {})
        kind = fields.get("rope_type") or fields.get("type") or "default"
        return Rope(kind, fields.get("rope_theta") or self.config.get("rope_theta") or 10000.0, fields)
