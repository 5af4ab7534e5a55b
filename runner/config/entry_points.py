"""Code of other packages that a flag names: an entry point of an installed package, and nothing else is imported."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from manifests.errors import UsageError


def find_entry_point(group: str, name: str, flag: str) -> EntryPoint:
    """Return the entry point of an installed package, without importing it."""
    installed = entry_points(group=group)
    matching = [entry for entry in installed if entry.name == name]
    if len(matching) != 1:
        names = ", ".join(sorted({entry.name for entry in installed})) or "none"
        problem = f"expected one entry point {name!r} of {group} in installed packages, found {len(matching)}"
        raise UsageError(f"{flag} {name}", problem, f"installed are {names}", code="options.no-entry-point")
    return matching[0]


def load_entry_point(group: str, name: str, flag: str) -> Any:
    """Import what an entry point names."""
    entry = find_entry_point(group, name, flag)
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        problem = f"entry point {entry.value} of {group} cannot be imported: {error}"
        hint = "install what the package needs, or correct its entry point"
        raise UsageError(f"{flag} {name}", problem, hint, code="options.entry-point-import") from error
