"""Folders in object stores: S3, Google Cloud Storage and Azure through obstore, others through fsspec."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from manifests.errors import InputError
from manifests.invariants import MANIFEST_NAME
from manifests.paths import problem_with_path
from stores.address import split_url
from stores.base import Range, is_hidden
from stores.object_client import SCHEMES, ObjectEntry, open_client
from stores.ranges import RangeReader

__all__ = ["CLAIM_NAME", "Client", "ObjectFile", "ObjectFolder", "list_objects", "open_objects"]

CLAIM_NAME = ".reshard-unfinished"  # lies in a prefix from the first object written there until the commit

_MAX_COUNT = 100_000  # objects in a checkpoint's folder


class Client(Protocol):
    @property
    def url(self) -> str:
        """The folder's address, without a slash at its end."""
        ...

    def entries(self) -> Iterator[ObjectEntry]: ...
    def look_up(self, name: str) -> ObjectEntry: ...
    def read(self, entry: ObjectEntry, begin: int, end: int) -> Iterator[memoryview]: ...


def open_objects(url: str) -> ObjectFolder:
    """Open a folder of an object store, `s3://BUCKET/PREFIX` for one. Nothing is read yet.

    Raises:
        InputError: the address is malformed, or the client for its scheme is not installed.
    """
    if split_url(url)[0] in SCHEMES:
        return ObjectFolder(open_client(url))
    from stores.filesystem_client import open_filesystem

    return ObjectFolder(open_filesystem(url))


class ObjectFolder:
    """Objects below a prefix. Each is pinned, by size and etag, when it is first listed or asked for."""

    kind = "huggingface"
    revision = None

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pinned: dict[str, ObjectEntry] = {}
        self._names: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return self.location

    @property
    def location(self) -> str:
        return self._client.url

    def names(self) -> tuple[str, ...]:
        """Give every object below the prefix but those of hidden folders, listed once.

        Raises:
            InputError: it cannot be listed, holds too much or names that are no paths, or is not finished.
        """
        if self._names is None:
            listed = list_objects(self._client)
            if CLAIM_NAME in listed and MANIFEST_NAME not in listed:
                raise InputError(
                    self.location,
                    "is not finished: it is being written, or its writing was interrupted",
                    "wait for the command that writes it, or run that again with --force",
                )
            for name, entry in listed.items():
                self._pinned.setdefault(name, entry)
            self._names = tuple(sorted(name for name in listed if name != CLAIM_NAME and not is_hidden(name)))
        return self._names

    def file(self, name: str) -> ObjectFile:
        """Give a file, looked up unless it was listed.

        Raises:
            InputError: there is none, or it cannot be reached.
        """
        if name not in self._pinned:
            self._pinned[name] = self._client.look_up(name)
        return ObjectFile(url=f"{self.location}/{name}", entry=self._pinned[name], client=self._client)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectFile:
    url: str
    entry: ObjectEntry
    client: Client = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes

    @property
    def pin(self) -> str:
        return f"{self.entry.nbytes} bytes, etag {self.entry.etag}"

    def open(self, ranges: Sequence[Range]) -> RangeReader:
        return RangeReader(partial(_fetch, self), ranges)


def list_objects(client: Client) -> dict[str, ObjectEntry]:
    """Give the objects below a prefix by name, less the empty ones that stand for folders.

    Raises:
        InputError: it cannot be listed, or holds too much or names that are no paths.
    """
    listed: dict[str, ObjectEntry] = {}
    for entry in client.entries():
        if not entry.name:
            continue
        problem = problem_with_path(entry.name)
        if problem:
            raise InputError(client.url, f"holds an object {entry.name!r}: {problem}")
        if len(listed) == _MAX_COUNT:
            raise InputError(client.url, f"holds more than {_MAX_COUNT} objects", "name the folder of one checkpoint")
        listed[entry.name] = entry
    folders = set(_parents(listed))
    return {name: entry for name, entry in listed.items() if entry.nbytes or name not in folders}


def _parents(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        while "/" in name:
            name = name.rpartition("/")[0]
            yield name


def _fetch(file: ObjectFile, into: memoryview, position: int, stop: threading.Event) -> None:
    end = position + len(into)
    if end > file.nbytes:
        raise InputError(str(file), f"ends at byte {file.nbytes}", "it was cut short after its header was read")
    filled = 0
    for chunk in file.client.read(file.entry, position, end):
        if stop.is_set():
            raise CancelledError
        if filled + len(chunk) > len(into):
            raise _wrong_length(file, into, position, "more")
        into[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    if filled < len(into):
        raise _wrong_length(file, into, position, str(filled))


def _wrong_length(file: ObjectFile, into: memoryview, position: int, found: str) -> InputError:
    return InputError(str(file), f"asked for {len(into)} bytes at {position}, the server sent {found}")
