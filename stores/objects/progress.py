"""The record of an unfinished output in a bucket, from which the next run of the same plan resumes."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Protocol, Self

from manifests.digest import digest_bytes
from stores.base import PROGRESS_NAME
from stores.folders.lock import Process
from stores.objects.client import ObjectEntry
from stores.objects.store import Client


class _Writable(Protocol):
    def put(self, name: str, data: bytes) -> None: ...


class CompletedObjects:
    """The record: the plan, the folder, the names that it writes, and the ETag of each completed object.

    It belongs to one lock. An object counts as completed while its size and ETag match the record, so that nobody has
    overwritten it.
    """

    def __init__(self, plan: str, lock: bytes, folder: str = "", names: Collection[str] = ()) -> None:
        self.plan, self.lock, self.folder, self.names = plan, digest_bytes(lock), folder, frozenset(names)
        self.is_stopped = False
        self._objects: dict[str, tuple[int, str]] = {}
        self._process = Process()
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._num_changes = self._num_written = 0  # those that the bucket's record has

    @property
    def has_work(self) -> bool:
        return bool(self._objects)

    def is_over(self, lock: bytes) -> bool:
        """Return whether the owner of the lock wrote this record and is known to have exited."""
        has_exited = self._process.is_local and not self._process.is_alive
        return digest_bytes(lock) == self.lock and (self.is_stopped or has_exited)

    def completed(self, listed: Mapping[str, ObjectEntry]) -> dict[str, ObjectEntry]:
        """Return the completed objects that are unchanged."""
        same = (name for name, facts in self._objects.items() if name in listed and _facts(listed[name]) == facts)
        return {name: listed[name] for name in same}

    def add(self, client: _Writable, entries: Mapping[str, ObjectEntry]) -> None:
        """Record completed objects, in the bucket too, except those without an ETag, which cannot be verified.

        Objects that are completed while another thread writes the record are written together, after it.
        """
        with self._lock:
            self._objects |= {name: facts for name, entry in entries.items() if (facts := _facts(entry))}
            self._num_changes += 1
            number = self._num_changes
        with self._writing:
            if self._num_written < number:
                self._put(client)

    def stop(self, client: _Writable) -> None:
        """Record that the process has stopped writing."""
        with self._writing:
            self.is_stopped = True
            self._put(client)

    def _put(self, client: _Writable) -> None:
        with self._lock:
            number = self._num_changes
            document = json.dumps(
                {
                    "plan": self.plan, "claim": self.lock, "folder": self.folder, "names": sorted(self.names),
                    "stopped": self.is_stopped, "process": asdict(self._process), "objects": self._objects,
                }
            )  # fmt: skip
        client.put(PROGRESS_NAME, document.encode())
        self._num_written = number

    @classmethod
    def decode(cls, data: bytes) -> Self | None:
        """Parse a record; None if it is not usable."""
        try:
            record = json.loads(data)
            progress = cls(str(record["plan"]), b"", str(record["folder"]), set(map(str, record["names"])))
            progress.lock, progress.is_stopped = str(record["claim"]), record["stopped"] is True
            progress._process = Process(**{**record["process"], "pid": int(record["process"]["pid"])})
            progress._objects = {str(name): (int(size), str(etag)) for name, (size, etag) in record["objects"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return progress


def read_progress(client: Client, listed: Mapping[str, ObjectEntry]) -> CompletedObjects | None:
    """Return the record of an unfinished output, if there is a usable one."""
    if PROGRESS_NAME not in listed:
        return None
    return CompletedObjects.decode(client.load(PROGRESS_NAME))


def _facts(entry: ObjectEntry) -> tuple[int, str] | None:
    return (entry.nbytes, entry.etag) if entry.etag else None
