"""Prefixes that can be written."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from manifests.errors import OutputError, Parameter, refused_by_system
from manifests.invariants import MANIFEST_NAME
from stores.address import SCHEME as HUB_SCHEME
from stores.address import place_of, split_url
from stores.base import LOCK_NAME, PROGRESS_NAME
from stores.objects.client import Upload, open_client
from stores.objects.store import Client
from stores.objects.uplink import NUM_PARTS

_EXPORT_MARK = "config.json"  # without it, a folder is not a model


class WritableClient(Client, Protocol):
    def put(self, name: str, data: bytes) -> None: ...
    def create(self, name: str, data: bytes) -> bool: ...
    def upload(self, name: str, nbytes: int, num_parts: int = NUM_PARTS) -> Upload: ...
    def remove(self, names: Collection[str]) -> None: ...
    def settled(self) -> WritableClient: ...


def open_writable(url: str) -> WritableClient:
    """Open a prefix for writing; no request is sent yet, and the folder of `file://` is made."""
    if url.startswith(HUB_SCHEME):
        hint = f"give a folder as {Parameter('out')}, then hf upload REPO FOLDER"
        raise OutputError(url, "writing to the hub is not supported", hint, code="output.unwritable")
    if split_url(url)[0] == "file":
        try:
            Path(place_of(url)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise refused_by_system(url, error, "cannot be written", code="output.unwritable") from error
    return open_client(url)


def remove_objects(client: WritableClient, names: Collection[str]) -> None:
    """Remove objects, those first that make an output one; the lock and the record beside it last, in one request."""
    order = {MANIFEST_NAME: 0, _EXPORT_MARK: 0, PROGRESS_NAME: 2, LOCK_NAME: 2}
    for turn in range(3):
        if batch := [name for name in names if order.get(name, 1) == turn]:
            client.remove(batch)
