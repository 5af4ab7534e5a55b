"""SOURCE as the user names it, opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from manifests.errors import InputError
from manifests.invariants import MANIFEST_NAME
from manifests.store import links_out_of
from reshard.sources.bundles import open_manifest
from reshard.sources.huggingface import open_folder
from reshard.tensors.checkpoint import Checkpoint
from stores.address import is_url
from stores.base import Folder
from stores.local import LocalFile, LocalFolder
from stores.manifest_file import ManifestFile, find_manifest_file
from stores.open import open_store

__all__ = ["links_of", "names_manifest", "open_source"]


def open_source(source: str, drop: frozenset[str] = frozenset()) -> Checkpoint:
    """Open a manifest by its file or folder, or a Hugging Face folder: on this machine, the hub or an object store.

    Raises:
        InputError: nothing there, or not what it must be (see the formats).
    """
    if _is_named(source):
        return _open_manifest(find_manifest_file(source), drop)
    folder = open_store(source)
    if _holds_manifest(folder):
        return _open_manifest(ManifestFile(folder), drop)
    return open_folder(folder, drop)


def links_of(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the files of a Hugging Face folder on this machine that links take out of it, and where to.

    Such files are packed: folders made of links to another model's files, with one of their own, are common. But they
    are named, as a folder from elsewhere may have links to files that nobody wants to publish. Names in an index and
    paths in a manifest never lead out of their folder.
    """
    originals = checkpoint.originals
    if checkpoint.manifest is not None or originals is None or is_url(originals.location):
        return
    files = {**originals.files, **{item.path: item.file for item in checkpoint.carried}}
    local = [name for name, file in files.items() if isinstance(file, LocalFile)]
    yield from links_out_of(Path(originals.location), local)


def names_manifest(source: str) -> bool:
    """Tell a manifest, named by its file or its folder, from other sources; what is not here is looked up there."""
    return _is_named(source) or _holds_manifest(open_store(source))


def _is_named(source: str) -> bool:
    """Tell what is a manifest without asking a server."""
    path = Path(source)
    return path.name == MANIFEST_NAME or (not is_url(source) and (path / MANIFEST_NAME).is_file())


def _holds_manifest(folder: Folder) -> bool:
    return not isinstance(folder, LocalFolder) and MANIFEST_NAME in folder.names()


def _open_manifest(manifest: ManifestFile, drop: frozenset[str]) -> Checkpoint:
    if drop:
        raise InputError(
            "--drop",
            "a manifest's tensors cannot be dropped",
            "drop them when packing the source",
            code="options.drop-from-manifest",
        )
    if isinstance(manifest.folder, LocalFolder):
        manifest.folder.check_name()
    return open_manifest(manifest)
