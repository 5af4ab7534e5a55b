"""The architectures that can be trained, and with tensor or expert parallelism. No torch."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points

from manifests.errors import ModelError
from manifests.models.catalogue import CatalogueEntry, entry_of


def is_generic(architecture: str) -> bool:
    """Return whether an architecture trains by the catalogue alone, on transformers' own forward."""
    return generic_entry(architecture) is not None


def generic_entry(architecture: str) -> CatalogueEntry | None:
    """Return the catalogue's entry of an architecture that transformers' own forward trains."""
    entry = entry_of(architecture)
    return None if entry is None or entry.refused else entry


def why_not_tensor_parallel(architecture: str, *, is_own: bool = False) -> str:
    """Return why the matrices of an architecture are not sharded over tensor-parallel ranks, or nothing if they are.

    Ranks ask a family of another package.
    """
    if is_own:
        return ""
    entry = generic_entry(architecture)
    return "there is no plan of how to shard it" if entry is None else entry.no_tp


def why_not_expert_parallel(architecture: str, *, is_own: bool = False) -> str:
    """Return why the experts of an architecture are not distributed over ranks, or nothing if they are.

    Ranks ask a family of another package.
    """
    if is_own:
        return ""
    entry = generic_entry(architecture)
    has_plan = entry is not None and entry.distributes_experts
    return "" if has_plan else "transformers has no plan for its experts that was found to compute the same"


def hands_on_trees(architecture: str) -> bool:
    """Return whether stages of an architecture of the catalogue exchange more than the hidden state."""
    entry = generic_entry(architecture)
    return entry is not None and entry.hands_on_trees


NARROW = "model.decoder.project_in"  # of an OPT: hidden states are not as wide before it, nor after the last layer


def check_trainable(architecture: str, where: str = "config.json", *, is_described: bool = False) -> None:
    """Check that this architecture can be trained, here or by a family of an installed package.

    One that `--model` described trains by such a family alone.
    """
    trains = not is_described and generic_entry(architecture) is not None
    family = find_family(architecture)
    if family is not None and trains:
        raise ModelError(
            f"entry points {GROUP}",
            f"{package_of(family)} has a family for {architecture}, which trains without it",
            f"uninstall {package_of(family)}, or give its architecture another name",
            code="model.family-claimed-twice",
        )
    if family is not None or trains:
        return
    if is_described:
        raise ModelError(
            f"{where}: architectures",
            f"{architecture!r} is described by --model, and no installed package has a family for it",
            f"docs/own-models.md shows how to write one (entry points {GROUP})",
            code="model.no-family",
        )
    entry = entry_of(architecture)
    why = f": {entry.refused}" if entry is not None and entry.refused else ""
    raise ModelError(
        f"{where}: architectures",
        f"{architecture!r} can be packed, but not trained{why}",
        "docs/models.md lists the architectures that train",
        code="model.no-family",
    )


GROUP = "runner.families"


def find_family(architecture: str) -> EntryPoint | None:
    """Return the entry point of an installed package for an architecture, if there is one."""
    folders = tuple((path, _mtime_ns(path)) for path in sys.path)
    entries = sorted(_families_in(folders).select(name=architecture), key=package_of)
    if len(entries) > 1:
        raise ModelError(
            f"entry points {GROUP}",
            f"{' and '.join(map(package_of, entries))} both have a family for {architecture}",
            "uninstall one of them",
            code="model.family-claimed-twice",
        )
    return entries[0] if entries else None


@lru_cache(maxsize=1)
def _families_in(folders: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Read the metadata of all packages, which takes milliseconds, again only if a folder of `sys.path` has changed."""
    return entry_points(group=GROUP)


def _mtime_ns(path: str) -> int:
    with suppress(OSError):
        return os.stat(path or ".").st_mtime_ns
    return -1


def package_of(entry_point: EntryPoint) -> str:
    """Return the name of the package that has an entry point."""
    return entry_point.dist.name if entry_point.dist is not None else entry_point.module
