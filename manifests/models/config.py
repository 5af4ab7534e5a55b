"""A typed reader of Hugging Face configs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from manifests.errors import InputError
from manifests.jsontext import kind_of

MAX_LAYERS = 10_000
MAX_EXPERTS = 10_000
_MAX_COUNT = (1 << 31) - 1


class ConfigReader:
    """Reads a Hugging Face config with errors that name the field.

    Absent and null mean the same. `prefix` is the path of an object inside the config.
    """

    def __init__(self, config: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.config, self.where, self.prefix = MappingProxyType(dict(config)), where, prefix

    def error(self, name: str, problem: str, hint: str = "", *, code: str) -> InputError:
        """Return an error that names the field."""
        return InputError(f"{self.where}: {self.prefix}{name}", problem, hint, code=code)

    def has(self, name: str) -> bool:
        return self.config.get(name) is not None

    def count(self, name: str, default: int | None = None, most: int = _MAX_COUNT, least: int = 1) -> int:
        """Return an integer from `least` to `most`; null or absent means `default`."""
        found = self.config.get(name)
        if found is None and default is not None:
            return default
        if type(found) is not int or found < least:
            expected = "a positive integer" if least == 1 else f"an integer, {least} or more"
            raise self.error(name, f"expected {expected}, found {_shown(found)}", code="config.invalid-field")
        if found > most:
            raise self.error(name, f"expected at most {most}, found {str(found)[:80]}", code="config.too-large")
        return found

    def counts(self, name: str) -> tuple[int, ...]:
        """Return a list of integers, 0 or more; null or absent means none."""
        found = self.config.get(name)
        if found is None:
            return ()
        if not isinstance(found, list) or not all(type(item) is int and item >= 0 for item in found):
            problem = f"expected a list of integers, 0 or more, found {_shown(found)}"
            raise self.error(name, problem, code="config.invalid-field")
        return tuple(found)

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; null or absent means none."""
        found = self.config.get(name)
        if found is None:
            return ()
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            problem = f"expected a list of strings, found {_shown(found)}"
            raise self.error(name, problem, code="config.invalid-field")
        return tuple(found)

    def flag(self, name: str, default: bool) -> bool:
        found = self.config.get(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            problem = f"expected true or false, found {kind_of(found)}"
            raise self.error(name, problem, code="config.invalid-field")
        return found

    def section(self, name: str) -> ConfigReader | None:
        """Return an object inside the config; null or absent means None."""
        found = self.config.get(name)
        if found is None:
            return None
        if not isinstance(found, Mapping):
            raise self.error(name, f"expected an object, found {kind_of(found)}", code="config.invalid-field")
        return ConfigReader(found, self.where, f"{self.prefix}{name}.")

    def expect(self, name: str, allowed: object) -> None:
        """Refuse a field whose other values are not supported; null or absent is fine."""
        found = self.config.get(name)
        if found is not None and found != allowed:
            problem = f"expected {allowed!r} or nothing, found {_shown(found)}"
            raise self.error(name, problem, "no other value is supported", code="config.unsupported-field")


def _shown(found: object) -> str:
    return "nothing" if found is None else repr(found)[:80]
