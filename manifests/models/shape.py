"""A model as its files see it, and a typed reader of the config it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from manifests.errors import InputError
from manifests.jsontext import kind_of

__all__ = ["MAX_LAYERS", "ConfigReader", "ModelShape"]

MAX_LAYERS = 10_000
_MAX_COUNT = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The modules, in the order they run, and every tensor they hold, by FQN.

    Each tied FQN is listed in `tensors`; `ties` groups them, owner first.
    """

    architecture: str
    num_layers: int
    modules: tuple[str, ...]
    tensors: Mapping[str, tuple[int, ...]]
    ties: tuple[tuple[str, ...], ...] = ()
    ignored_suffixes: tuple[str, ...] = ()  # tensors that old files carry and the model recomputes

    @property
    def num_params(self) -> int:
        """Parameters of the whole model; a tied one counts once."""
        replicas = {fqn for group in self.ties for fqn in group[1:]}
        return sum(prod(shape) for fqn, shape in self.tensors.items() if fqn not in replicas)


class ConfigReader:
    """Reads a Hugging Face config with errors that name the field."""

    def __init__(self, config: Mapping[str, object], where: str) -> None:
        self.config, self.where = MappingProxyType(dict(config)), where

    def count(self, name: str, default: int | None = None, most: int = _MAX_COUNT) -> int:
        """Give a positive integer, at most `most`; null or absent means `default`."""
        found = self.config.get(name)
        if found is None and default is not None:
            return default
        if type(found) is not int or found < 1:
            shown = "nothing" if found is None else repr(found)[:80]
            raise InputError(f"{self.where}: {name}", f"expected a positive integer, found {shown}")
        if found > most:
            raise InputError(f"{self.where}: {name}", f"expected at most {most}, found {str(found)[:80]}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self.config.get(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise InputError(f"{self.where}: {name}", f"expected true or false, found {kind_of(found)}")
        return found
