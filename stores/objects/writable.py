"""Prefixes that can be written, and the upload of one object."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Protocol

from manifests.errors import InputError, OutputError, Parameter, refused_by_system
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


logger = logging.getLogger(__name__)


class ObjectWriter:
    """One object, written sequentially; it exists once it is finished.

    `check` raises if the prefix is no longer locked by this process. `done` is called once the object exists.
    """

    def __init__(
        self,
        where: str,
        upload: Upload,
        nbytes: int,
        check: Callable[[], None],
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._where = where
        self._upload = upload
        self._nbytes = nbytes
        self._check, self._done = check, done
        self._position = 0
        self.is_open = True

    @property
    def is_aligned(self) -> bool:
        return False

    def write(self, buffer: memoryview, begin: int, end: int, position: int) -> None:
        """Write `buffer[begin:end]` at `position`, the end of the previous piece.

        Memory may be used for other bytes afterwards, unless it is read-only: then it is sent without a copy.
        """
        assert position == self._position, f"{self._where}: {position} after {self._position}"
        piece = buffer[begin:end]
        self._upload.write(piece if piece.readonly else bytes(piece))
        self._position += end - begin

    def write_all(self, blocks: Iterable[memoryview | bytes]) -> None:
        """Write the whole object from these blocks, and complete it; if that fails, the upload is abandoned."""
        try:
            for block in blocks:
                self.write(memoryview(block), 0, len(block), self._position)
            self.finish()
        finally:
            self.close()

    def finish(self) -> None:
        """Complete the upload, so that the object exists."""
        assert self._position == self._nbytes, f"{self._where}: {self._position} of {self._nbytes} bytes"
        self._check()
        self.is_open = False
        self._upload.finish()
        self._done()

    def close(self) -> None:
        """Abandon the upload unless it is finished; may be called twice."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            self._upload.abandon()
        except InputError as error:
            logger.warning(
                "%s: an unfinished upload, which takes space and is not listed, may be left: %s",
                self._where,
                error.problem,
            )
