"""Open a folder or a manifest by its address: on this machine, on the hub or in an object store.

# Note [Kind of an address]
Whether an address is local, of the hub or of a bucket is decided once, where the user wrote it. What is derived from
it, such as a step below a folder, is opened with `open_below` and has the same kind: a path that is missing must not
become a repository of somebody else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from manifests.codec import decode_manifest
from manifests.digest import digest_bytes
from manifests.errors import ManifestError, SourceError, UsageError, system_errors
from manifests.invariants import MANIFEST_NAME
from manifests.paths import is_folder, status_of
from manifests.schema import Manifest, Parent
from manifests.store import check_links, no_manifest
from stores.address import SCHEME, is_url, parse_hub_address
from stores.base import Folder, read_whole
from stores.local import LocalFolder


def open_store(address: str) -> Folder:
    """Open a local folder, a repository on the hub, or a prefix in an object store.

    Existing paths are local. `hf://org/name[@revision]`, and `org/name[@revision]` if neither that path nor `org`
    exists, are on the hub. Any other `scheme://` is an object store. See Note [Kind of an address].
    """
    if is_url(address) and not address.startswith(SCHEME):
        from stores.objects.store import open_objects

        return open_objects(address)
    hub_address = None if _is_here(Path(address)) else parse_hub_address(address)
    if hub_address is None:
        return LocalFolder(Path(address))
    if hub_address.is_bare and _is_here(Path(parent := address.partition("/")[0]), follows_links=False):
        problem = f"no such folder, though {parent} is on this machine"
        hint = f"check the path; a repository of the hub would be {hub_address}"
        raise SourceError(address, problem, hint, code="source.not-a-folder")
    from stores.hub.store import open_hub

    return open_hub(hub_address)


def _is_here(path: Path, *, follows_links: bool = True) -> bool:
    with system_errors(path, code="store.unreadable"):
        return status_of(path, follows_links=follows_links) is not None


def open_below(address: str, folder: Folder, name: str) -> Folder:
    """Open a folder that is inside `folder`, which `address` opened, in the same store; it may not exist."""
    if isinstance(folder, LocalFolder):
        return LocalFolder(folder.path / name)
    return open_store(f"{address.rstrip('/')}/{name}")


Address = str | Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadManifest:
    """A manifest, read once for all that need it, and the folder to which its paths are relative."""

    folder: Folder
    name: str  # of its file
    data: bytes
    digest: str
    manifest: Manifest

    def __str__(self) -> str:
        return str(self.folder.file(self.name))

    @property
    def root(self) -> Path:
        """The absolute path of its folder, which is on this machine."""
        assert isinstance(self.folder, LocalFolder), "a path"
        return self.folder.path.resolve()

    @property
    def parent(self) -> Parent:
        """This manifest as the parent of another one."""
        return Parent(location=self.folder.location, digest=self.digest)


def open_manifest(address: Address | Folder) -> ReadManifest:
    """Read a manifest, by its file's address or its folder's. Only a `scheme://` is off this machine.

    Links to its folder are followed once: a `latest` that moves meanwhile mixes no two checkpoints.
    """
    folder, name = locate_manifest(address)
    file = folder.file(name)
    data = read_whole(file)
    manifest = decode_manifest(data, str(file))
    if isinstance(folder, LocalFolder):
        check_links(folder.path, manifest)
    return ReadManifest(folder=folder, name=name, data=data, digest=digest_bytes(data), manifest=manifest)


def locate_manifest(address: Address | Folder) -> tuple[Folder, str]:
    """Return the folder of a manifest, and the name of its file."""
    if not isinstance(address, str | Path):
        if isinstance(address, LocalFolder):
            return locate_manifest(address.path)
        if not hasattr(address, "file"):
            raise UsageError(
                "source", f"expected a path or an address, found {address!r}", code="options.invalid-value"
            )
        return address, MANIFEST_NAME
    if is_url(address):
        folder = open_store(str(address).removesuffix(f"/{MANIFEST_NAME}"))
        if MANIFEST_NAME not in folder.names():
            raise no_manifest(str(address))
        return folder, MANIFEST_NAME
    path = Path(address)
    with system_errors(path, code="store.unreadable", names_file=True):
        file = path / MANIFEST_NAME if is_folder(path) else path
        is_missing = status_of(file) is None
    if is_missing:
        raise no_manifest(str(address), path)
    if file.suffix != ".json":
        hint = "name the folder that reshard pack or a training run wrote"
        raise ManifestError(str(file), "is not a manifest", hint, code="manifest.not-a-manifest")
    target = file.resolve()
    if str(target) == os.path.abspath(file):
        return LocalFolder(file.parent), file.name
    # In the hub's cache, the link's target has another name and is in a folder without the checkpoint's other files.
    target = target if target.name == MANIFEST_NAME else file.parent.resolve() / file.name
    return LocalFolder(target.parent), target.name
