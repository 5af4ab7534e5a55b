"""Manifests by address: on this machine, on the hub or in an object store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manifests.codec import decode_manifest
from manifests.digest import digest_bytes
from manifests.invariants import MANIFEST_NAME
from manifests.schema import Manifest
from manifests.store import check_links, find_manifest, no_manifest
from stores.address import is_url
from stores.base import Folder, read_whole
from stores.local import LocalFolder
from stores.open import open_store

Address = str | Path


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A manifest's file and its folder, to which its paths are relative."""

    folder: Folder
    name: str = MANIFEST_NAME

    def __str__(self) -> str:
        return str(self.folder.file(self.name))

    def read(self) -> tuple[Manifest, str]:
        """Return the manifest and the digest of its file.

        Raises:
            ManifestError: not valid (see `decode_manifest`).
            InputError: it cannot be read.
        """
        data = read_whole(self.folder.file(self.name))
        manifest = decode_manifest(data, str(self))
        if isinstance(self.folder, LocalFolder):
            check_links(self.folder.path, manifest)
        return manifest, digest_bytes(data)


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """A manifest that was read, for all that need it: over a network, its bytes take a request and its size."""

    file: ManifestFile
    manifest: Manifest
    digest: str


def find_manifest_file(address: Address) -> ManifestFile:
    """Find a manifest by its file or its folder. Only a `scheme://` is off this machine.

    Raises:
        ManifestError: it does not exist.
        StoreError: its store refuses the request.
        UnreachableError: its store cannot be reached.
    """
    if is_url(address):
        folder = open_store(address.removesuffix(f"/{MANIFEST_NAME}"))
        if MANIFEST_NAME not in folder.names():
            raise no_manifest(address)
        return ManifestFile(folder)
    path = find_manifest(Path(address))
    if not path.exists():
        raise no_manifest(str(address), Path(address))
    return ManifestFile(LocalFolder(path.parent), path.name)


def read_manifest_file(address: Address) -> ReadManifest:
    """Find a manifest and read it; raises as `find_manifest_file` and `ManifestFile.read`."""
    file = find_manifest_file(address)
    return ReadManifest(file, *file.read())
