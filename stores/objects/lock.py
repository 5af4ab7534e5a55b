"""The lock object of a bucket's prefix, the record of an unfinished output there, and the objects that may be removed.

# Note [Objects of others in a prefix]
A process that locks a prefix records there, before it writes the first object, the names that it will write (see
`CompletedObjects`), after checking that none of them exists, and those of objects that earlier writers left
unfinished. Objects that are recorded so are removed by the next writer; a prefix that has others is refused. An output
that is finished is never replaced: its objects would be overwritten one by one. Whether it is finished is looked at
again once the lock is taken over: its writer may have committed it meanwhile, and then removed its record.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Self

from manifests.digest import digest_bytes
from manifests.errors import OutputError, Parameter
from manifests.invariants import MANIFEST_NAME
from stores.base import LOCK_NAME, PROGRESS_NAME
from stores.folders.lock import Process
from stores.folders.owned import foreign_error
from stores.objects.client import ObjectEntry, ObstoreClient

_SHOWN_CHARS = 200  # of a lock object's text
_WORKING = (LOCK_NAME, PROGRESS_NAME)


def unfinished_objects(
    client: ObstoreClient,
    listed: Mapping[str, ObjectEntry],
    recorded: Collection[str] = (),
    *,
    is_unfinished: bool = False,
    takes_over: bool = False,
) -> frozenset[str]:
    """Return the objects below a prefix that a new output removes, of those that earlier writers `recorded`.

    A prefix that has any other object is refused, and an unfinished output unless the new one `takes_over`.
    """
    others = {name: entry for name, entry in listed.items() if name not in _WORKING}
    if not is_unfinished:
        if others:
            hint = f"choose another {Parameter('out')}, or remove it first: nothing in a bucket is replaced"
            raise OutputError(client.url, "already exists", hint, code="output.exists")
    elif not takes_over:
        raise _unfinished_error(client, others)
    elif foreign := sorted(others.keys() - recorded):
        raise foreign_error(client.url, foreign)
    return frozenset(others)


def has_ended(before: Collection[str], now: Collection[str], last: str) -> bool:
    """Return whether the writer of an unfinished output has finished or removed it between two listings.

    `last` is the object that commits it. Where both listings have that one, a writer was killed before it unlocked.
    """
    is_committed = MANIFEST_NAME in now or (last in now and last not in before)
    return is_committed or (PROGRESS_NAME in before and PROGRESS_NAME not in now)


def new_lock() -> bytes:
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    who = f"begun {begun} on {socket.gethostname()} by process {os.getpid()}"
    return f"{who}\nA command is writing here, or was interrupted.\n{uuid.uuid4()}\n".encode()


def check_lock(client: ObstoreClient, lock: bytes) -> None:
    """Raise unless a prefix still has this lock: otherwise nothing may be written there."""
    if client.load(LOCK_NAME) != lock:
        problem = f"another process took it over with {Parameter('force', True)}"
        raise OutputError(client.url, problem, f"choose another {Parameter('out')}", code="output.contended")


def _unfinished_error(client: ObstoreClient, others: Mapping[str, ObjectEntry]) -> OutputError:
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
    """The record: the plan, the names that it writes or will remove, the last one, and each completed object's ETag.

    It belongs to one lock. An object counts as completed while its size and ETag match the record, so that nobody has
    overwritten it.
    """

    def __init__(self, plan: str, lock: bytes, names: Collection[str] = (), last: str = MANIFEST_NAME) -> None:
        self.plan, self.lock, self.names, self.last = plan, digest_bytes(lock), frozenset(names), last
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
                    "plan": self.plan, "claim": self.lock, "names": sorted(self.names), "last": self.last,
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
            names, last = set(map(str, record["names"])), str(record.get("last", MANIFEST_NAME))
            progress = cls(str(record["plan"]), b"", names, last)
            progress.lock, progress.is_stopped = str(record["claim"]), record["stopped"] is True
            process = record["process"]
            texts = {name: str(process[name]) for name in ("host", "birth", "namespace")}
            progress._process = Process(pid=int(process["pid"]), **texts)
            progress._objects = {str(name): (int(size), str(etag)) for name, (size, etag) in record["objects"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None
        return progress


def read_progress(client: ObstoreClient, listed: Mapping[str, ObjectEntry]) -> CompletedObjects | None:
    """Return the record of an unfinished output, if there is a usable one."""
    if PROGRESS_NAME not in listed:
        return None
    return CompletedObjects.decode(client.load(PROGRESS_NAME))


def _facts(entry: ObjectEntry) -> tuple[int, str] | None:
    return (entry.nbytes, entry.etag) if entry.etag else None
