"""Open a folder by its address.

# Note [Kind of an address]
Whether an address is local, of the hub or of a bucket is decided once, where the user wrote it. What is derived from
it, such as a step below a folder, is opened with `open_below` and has the same kind: a path that is missing must not
become a repository of somebody else.
"""

from __future__ import annotations

import os
from pathlib import Path

from manifests.errors import SourceError
from stores.address import SCHEME, is_url, parse_hub_address
from stores.base import Folder
from stores.local import LocalFolder


def open_store(address: str) -> Folder:
    """Open a local folder, a repository on the hub, or a prefix in an object store.

    Existing paths are local. `hf://org/name[@revision]`, and `org/name[@revision]` if neither that path nor `org`
    exists, are on the hub. Any other `scheme://` is an object store. See Note [Kind of an address].

    Raises:
        SourceError: no such path, in a folder that exists.
        StoreError: the address is malformed, or the store refuses the request.
        UnreachableError: the store cannot be reached.
    """
    if is_url(address) and not address.startswith(SCHEME):
        from stores.objects.store import open_objects

        return open_objects(address)
    hub_address = None if Path(address).exists() else parse_hub_address(address)
    if hub_address is None:
        return LocalFolder(Path(address))
    if hub_address.is_bare and os.path.lexists(parent := address.partition("/")[0]):
        problem = f"no such folder, though {parent} is on this machine"
        hint = f"check the path; a repository of the hub would be {hub_address}"
        raise SourceError(address, problem, hint, code="source.not-a-folder")
    from stores.hub.store import open_hub

    return open_hub(hub_address)


def open_below(address: str, folder: Folder, name: str) -> Folder:
    """Open a folder that is inside `folder`, which `address` opened, in the same store; it may not exist."""
    if isinstance(folder, LocalFolder):
        return LocalFolder(folder.path / name)
    return open_store(f"{address.rstrip('/')}/{name}")
