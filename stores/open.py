"""Open a folder by its address."""

from __future__ import annotations

from pathlib import Path

from stores.address import SCHEME, is_url, parse_hub_address
from stores.base import Folder
from stores.local import LocalFolder

__all__ = ["open_store"]


def open_store(address: str) -> Folder:
    """Open a local folder, a repository on the hub, or a prefix in an object store.

    Existing paths are local. `hf://org/name[@revision]`, and `org/name[@revision]` if no such path exists, are on
    the hub. Any other `scheme://` is an object store.

    Raises:
        StoreError: the address is malformed, or the store refuses the request.
        UnreachableError: the store cannot be reached.
    """
    if is_url(address) and not address.startswith(SCHEME):
        from stores.objects import open_objects

        return open_objects(address)
    hub_address = None if Path(address).exists() else parse_hub_address(address)
    if hub_address is None:
        return LocalFolder(Path(address))
    from stores.hub import open_hub

    return open_hub(hub_address)
