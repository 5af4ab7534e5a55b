"""Families of installed packages: entry points of the group `runner.families`. Nothing is imported, no torch."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from manifests.errors import ModelError

GROUP = "runner.families"


def find_family(architecture: str) -> EntryPoint | None:
    """Return the entry point of an installed package for an architecture, if there is one.

    Raises:
        ModelError: two packages have one.
    """
    found = sorted(entry_points(group=GROUP, name=architecture), key=package_of)
    if len(found) > 1:
        raise ModelError(
            f"entry points {GROUP}",
            f"{' and '.join(map(package_of, found))} both have a family for {architecture}",
            "uninstall one of them",
            code="model.family-claimed-twice",
        )
    return found[0] if found else None


def package_of(found: EntryPoint) -> str:
    """Return the name of the package that has an entry point."""
    return found.dist.name if found.dist is not None else found.module
