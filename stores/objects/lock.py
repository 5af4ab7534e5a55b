"""The lock object of a bucket's prefix, the record of an unfinished output there, and the objects that may be removed.

# Note [Objects of others in a prefix]
A process that locks a prefix records there, before it writes the first object, the names that it will write (see
`CompletedObjects`), after checking that none of them exists. The lock object lists names too: of objects that
the new output replaces, and of those that earlier writers left unfinished. `--force` removes objects that are listed
so, or in the manifest of the old output. A prefix that has others is refused, and so is one with an export: its
shards would be overwritten one by one.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Self

from manifests.codec import decode_manifest
from manifests.digest import digest_bytes
from manifests.errors import InputError, OutputError, Parameter, UnreachableError
from manifests.invariants import MANIFEST_NAME
from stores.base import LOCK_NAME, PROGRESS_NAME, read_whole
from stores.folders.lock import Process
from stores.folders.owned import foreign_error, owned_files
from stores.objects.client import ObjectEntry, ObstoreClient
from stores.objects.store import ObjectFile

_SHOWN_CHARS = 200  # of a lock object's text
_HEAD_LINES = 3  # of a lock object; names of objects that must be removed may follow
_WORKING = (LOCK_NAME, PROGRESS_NAME)


def _objects_of_manifest(client: ObstoreClient, listed: Mapping[str, ObjectEntry]) -> Collection[str] | None:
    """Return the names of a prefix's manifest and of all files made with it; None if it cannot be read."""
    if MANIFEST_NAME not in listed:
        return None
    file = ObjectFile(url=f"{client.url}/{MANIFEST_NAME}", entry=listed[MANIFEST_NAME], client=client)
    try:
        manifest = decode_manifest(read_whole(file), str(file))
    except UnreachableError:
        raise
    except InputError:
        return None
    return set(owned_files(manifest))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """An output to write: its shards, its small files, and the one of these that commits it.

    Only a packed checkpoint, which a manifest commits, may replace an old one.
    """

    shards: Collection[str] = ()
    small: Collection[str] = ()
    last: str = MANIFEST_NAME


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedObjects:
    """The objects below a prefix; `ours` are those of an `old`, readable output, or left unfinished by a writer."""

    listed: Mapping[str, ObjectEntry]
    ours: frozenset[str] = frozenset()
    old: frozenset[str] = frozenset()

    def names_to_write(self, wanted: Wanted, folder: str) -> set[str]:
        """Return the names that are written before the commit; small files of a replacement are written with it."""
        return {folder + path for path in wanted.shards} | set(() if self.old else wanted.small)


def check_existing(
    client: ObstoreClient,
    listed: Mapping[str, ObjectEntry],
    wanted: Wanted,
    *,
    unremoved: Collection[str] = (),
    is_unfinished: bool = False,
    force: bool = False,
) -> ListedObjects:
    """Determine what an output may replace; `unremoved` are names that earlier writers left for removal."""
    others = {name: entry for name, entry in listed.items() if name not in _WORKING}
    if not others and not is_unfinished:
        return ListedObjects(listed=listed)
    is_packed = wanted.last == MANIFEST_NAME
    if not force:
        raise _not_without_force(client, others, is_unfinished, is_packed=is_packed)
    named = () if is_unfinished else _objects_of_manifest(client, others) if is_packed else None
    if named is None:
        reason = "is not a packed checkpoint" if is_packed else "a bucket cannot replace a model's files in one step"
        problem = f"exists, and {reason}; {Parameter('force', True)} does not replace it"
        hint = f"choose another {Parameter('out')}, or remove it yourself"
        raise OutputError(client.url, problem, hint, code="output.not-ours")
    ours = frozenset({*named, *unremoved} & others.keys())
    if foreign := sorted(others.keys() - ours):
        raise foreign_error(client.url, foreign)
    return ListedObjects(listed=listed, ours=ours, old=frozenset(named))


def new_lock() -> bytes:
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    who = f"begun {begun} on {socket.gethostname()} by process {os.getpid()}"
    return f"{who}\nA command is writing here, or was interrupted.\n{uuid.uuid4()}\n".encode()


def lines_of(names: Iterable[str]) -> bytes:
    return "".join(f"{name}\n" for name in sorted(names)).encode()


def remaining_names(lock: bytes) -> set[str]:
    """Return the names that the owner of a lock was about to remove; it may have died."""
    return {name for name in lock.decode(errors="replace").split("\n")[_HEAD_LINES:] if name}


def _not_without_force(
    client: ObstoreClient, others: Mapping[str, ObjectEntry], is_unfinished: bool, *, is_packed: bool
) -> InputError:
    if not is_unfinished:
        cure = f"replace it with {Parameter('force', True)}" if is_packed else "remove it yourself"
        hint = f"choose another {Parameter('out')}, or {cure}"
        return OutputError(client.url, "already exists", hint, code="output.exists")
    text = client.load(LOCK_NAME)[:_SHOWN_CHARS].decode(errors="replace").partition("\n")[0]
    nbytes = sum(entry.nbytes for entry in others.values())
    what = f"{len(others)} object{'' if len(others) == 1 else 's'}, {nbytes} bytes, {text}"
    return OutputError(
        client.url,
        f"is being written by another command, or was left unfinished by one: {what}",
        f"wait for that one; if it has ended, {Parameter('force', True)} takes its place, and resumes the same plan",
        code="output.unfinished",
    )


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

    def add(self, client: ObstoreClient, entries: Mapping[str, ObjectEntry]) -> None:
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

    def stop(self, client: ObstoreClient) -> None:
        """Record that the process has stopped writing."""
        with self._writing:
            self.is_stopped = True
            self._put(client)

    def _put(self, client: ObstoreClient) -> None:
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
            process = record["process"]
            texts = {name: str(process[name]) for name in ("host", "birth", "namespace")}
            progress._process = Process(pid=int(process["pid"]), **texts)
            progress._objects = {str(name): (int(size), str(etag)) for name, (size, etag) in record["objects"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return progress


def read_progress(client: ObstoreClient, listed: Mapping[str, ObjectEntry]) -> CompletedObjects | None:
    """Return the record of an unfinished output, if there is a usable one."""
    if PROGRESS_NAME not in listed:
        return None
    return CompletedObjects.decode(client.load(PROGRESS_NAME))


def _facts(entry: ObjectEntry) -> tuple[int, str] | None:
    return (entry.nbytes, entry.etag) if entry.etag else None
