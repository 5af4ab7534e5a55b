"""SOURCE as the user names it, opened."""

from __future__ import annotations

from pathlib import Path

from manifests.errors import InputError
from manifests.invariants import MANIFEST_NAME
from reshard.checkpoint import Checkpoint
from reshard.formats.bundles import open_manifest
from reshard.formats.huggingface import open_folder
from stores.open import open_store

__all__ = ["names_manifest", "open_source"]


def open_source(source: str, drop: frozenset[str] = frozenset()) -> Checkpoint:
    """Open a manifest by its file or folder, or a Hugging Face folder: on this machine, the hub or an object store.

    Raises:
        InputError: nothing there, or not what it must be (see the formats).
    """
    if names_manifest(source):
        if drop:
            raise InputError("--drop", "a manifest's tensors cannot be dropped", "drop them when packing the source")
        return open_manifest(Path(source))
    return open_folder(open_store(source), drop)


def names_manifest(source: str) -> bool:
    """Tell a manifest, named by its file or its folder, from other sources."""
    path = Path(source)
    return path.name == MANIFEST_NAME or (path / MANIFEST_NAME).is_file()
