"""Folders in object stores, through obstore."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TypeVar

from manifests.errors import InputError, SourceError, StoreError, UnreachableError
from manifests.invariants import MANIFEST_NAME
from manifests.paths import problem_with_path
from manifests.versions import VERSION_FILE
from stores.base import LOCK_NAME, PROGRESS_NAME, SOURCE_CHANGED, Range, is_hidden
from stores.net.retries import Pace, PassingError, Retries, Stream, Streams, keep_trying
from stores.objects.client import ObjectEntry, ObstoreClient, open_client
from stores.prefetch import LendingFetch, RangeReader

T = TypeVar("T")
_MAX_COUNT = 100_000  # objects in a checkpoint's folder; a chain may have as many versions as it gets


def open_objects(url: str, retries: Retries | None = None) -> ObjectFolder:
    """Open a folder of an object store, such as `s3://BUCKET/PREFIX`, without reading anything."""
    return ObjectFolder(open_client(url, retries), retries)


class ObjectFolder:
    """Objects below a prefix. Size and ETag of each are recorded when it is first listed or looked up."""

    kind = "huggingface"
    revision = None

    def __init__(self, client: ObstoreClient, retries: Retries | None = None) -> None:
        self._client, self._retries, self._streams = client, retries or Retries(), Streams()
        self._pinned: dict[str, ObjectEntry] = {}
        self._names: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return self.location

    @property
    def location(self) -> str:
        return self._client.url

    def names(self) -> tuple[str, ...]:
        """Return every object below the prefix, except in hidden folders; listed once."""
        if self._names is None:
            listed = list_objects(self._client)
            if LOCK_NAME in listed and MANIFEST_NAME not in listed:
                raise StoreError(
                    self.location,
                    "is not finished: it is being written, or its writing was interrupted",
                    "wait for the command that writes it, or run the same command again to resume",
                    code="store.unfinished",
                )
            for name, entry in listed.items():
                self._pinned.setdefault(name, entry)
            self._names = tuple(
                sorted(name for name in listed if name not in (LOCK_NAME, PROGRESS_NAME) and not is_hidden(name))
            )
        return self._names

    def file(self, name: str) -> ObjectFile:
        """Return a file, which is looked up unless it was listed."""
        if name not in self._pinned:
            self._pinned[name] = self._client.look_up(name)
        return ObjectFile(
            url=f"{self.location}/{name}",
            entry=self._pinned[name],
            client=self._client,
            retries=self._retries,
            streams=self._streams,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectFile:
    url: str
    entry: ObjectEntry
    client: ObstoreClient = field(compare=False, repr=False)
    retries: Retries = field(default_factory=Retries, compare=False, repr=False)
    streams: Streams = field(default_factory=Streams, compare=False, repr=False)  # of the folder

    def __str__(self) -> str:
        return self.url

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes

    @property
    def fingerprint(self) -> str:
        return f"{self.entry.nbytes} bytes, etag {self.entry.etag}"

    def open(self, ranges: Sequence[Range]) -> RangeReader:
        return RangeReader(_ObjectFetch(self), ranges)

    def fetching(self) -> LendingFetch:
        """Return the function that fetches its bytes; see `stores.prefetch.RemoteFile`."""
        return _ObjectFetch(self)


def list_objects(client: ObstoreClient) -> dict[str, ObjectEntry]:
    """Return the objects below a prefix by name, without empty ones that represent folders."""
    listed: dict[str, ObjectEntry] = {}
    count = 0
    for entry in client.entries():
        if not entry.name:
            continue
        problem = problem_with_path(entry.name)
        if problem:
            raise StoreError(client.url, f"contains an object {entry.name!r}: {problem}", code="store.invalid-name")
        count += VERSION_FILE.fullmatch(entry.name) is None
        if count > _MAX_COUNT:
            problem = f"contains more than {_MAX_COUNT} objects"
            raise StoreError(client.url, problem, "name the folder of one checkpoint", code="store.too-many-files")
        listed[entry.name] = entry
    folders = set(_parents(listed))
    return {name: entry for name, entry in listed.items() if entry.nbytes or name not in folders}


def _parents(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        while "/" in name:
            name = name.rpartition("/")[0]
            yield name


@dataclass(frozen=True, slots=True)
class _ObjectFetch:
    """Fetches ranges of an object: see `stores.prefetch.LendingFetch`."""

    file: ObjectFile

    def __call__(self, into: memoryview, position: int, stop: threading.Event) -> None:
        """Fill `into` with the bytes at `position`. Bytes that arrived before a connection broke are kept."""
        file, end, filled = self.file, position + len(into), 0
        self._check_end(end)

        def attempt(stream: Stream) -> None:
            nonlocal filled
            pace = Pace(str(file), file.retries.window_s)
            for chunk in file.client.read(file.entry, position + filled, end):
                if stop.is_set():
                    raise CancelledError
                if filled + len(chunk) > len(into):
                    raise _wrong_length(file, len(into), position, "more")
                into[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
                pace.take(len(chunk))
                stream.take(len(chunk))

        keep_trying(lambda: self._as_stream(attempt, stop), str(file), file.retries, stop, nbytes_done=lambda: filled)
        if filled < len(into):
            raise _wrong_length(file, len(into), position, str(filled))

    def lend(self, position: int, nbytes: int, stop: threading.Event) -> memoryview | None:
        """Return the bytes in obstore's memory, where the store is so fast that no response needs to be resumed."""
        file = self.file
        self._check_end(position + nbytes)
        if not file.streams.is_fast:
            return None

        def attempt(stream: Stream) -> memoryview | None:
            if stop.is_set():
                raise CancelledError
            if not file.streams.is_fast:  # as the last response that ended while this one waited for its turn
                return None
            data = file.client.read_at_once(file.entry, position, position + nbytes)
            stream.take(len(data))
            return data

        try:
            data = self._as_stream(attempt, stop)
        except PassingError:
            return None
        if data is not None and len(data) != nbytes:
            raise _wrong_length(file, nbytes, position, str(len(data)))
        return data

    def _check_end(self, end: int) -> None:
        if end > self.file.nbytes:
            raise SourceError(
                str(self.file),
                f"ends at byte {self.file.nbytes}",
                "it was cut short after its header was read",
                code=SOURCE_CHANGED,
            )

    def _as_stream(self, attempt: Callable[[Stream], T], stop: threading.Event) -> T:
        with self.file.streams.slot(stop) as stream:
            try:
                return attempt(stream)
            except UnreachableError as error:
                raise PassingError(error.problem, error.hint, code=error.code) from error


def _wrong_length(file: ObjectFile, nbytes: int, position: int, num_received: str) -> InputError:
    problem = f"asked for {nbytes} bytes at {position}, the server sent {num_received}"
    return StoreError(str(file), problem, code="store.wrong-answer")
