"""A package's public names, imported when they are first used: `import reshard` stays as fast as an empty module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_attributes(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package (PEP 562); `modules` lists the names that each defines."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("reshard")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, "__version__"})

    return get, names
