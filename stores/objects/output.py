"""Outputs in a bucket: objects are written whole, and the one that commits them last.

Objects cannot be renamed, so an output is written under its final name, protected by a lock object that excludes other
writers and marks the prefix as unfinished. Parts are uploaded in order (obstore offers nothing else), so a shard's
header, which comes first and contains the digests, must be known before its data.

Memory: one part more per open writer than it sends at a time, `NUM_PARTS` by default: 40 MiB for an object of up to
78 GiB, more for longer ones.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Self

from manifests.errors import InputError, OutputError, Parameter
from manifests.invariants import MANIFEST_NAME
from stores.base import LOCK_NAME, PROGRESS_NAME, Blocks
from stores.objects.client import ObjectEntry, ObjectWriter, ObstoreClient, open_writable, remove_objects
from stores.objects.lock import (
    CompletedObjects,
    check_lock,
    has_ended,
    new_lock,
    read_progress,
    unfinished_objects,
)
from stores.objects.store import list_objects
from stores.objects.uplink import NUM_PARTS
from stores.workers import NUM_AT_ONCE, WaitingPool

logger = logging.getLogger(__name__)

SMALL_NBYTES = 8 << 20  # sent, or kept, in one piece
_MOST_SENT = 8  # such files at a time, beside others


def open_output(
    url: str, *, force: bool = False, wanted: Collection[str] = (), plan: str = "", last: str = MANIFEST_NAME
) -> ObjectTarget:
    """Lock a prefix of a bucket for an output of the `wanted` objects and the `last` one, which commits it.

    An output of the same `plan` that was left unfinished is resumed: its completed objects stay. Without `force`
    that is done where its writer is known to have ended. With `force`, another unfinished output is removed first.
    Nothing else is removed, see Note [Objects of others in a prefix].
    """
    client = open_writable(url)
    listed = list_objects(client)
    is_unfinished = LOCK_NAME in listed and MANIFEST_NAME not in listed
    before = client.load(LOCK_NAME) if LOCK_NAME in listed else b""
    record = read_progress(client, listed)
    recorded = record.names if record else frozenset[str]()
    unfinished = record if record and plan and record.plan == plan else None
    takes_over = force or (unfinished is not None and unfinished.is_over(before))
    unfinished_objects(client, listed, recorded, is_unfinished=is_unfinished, takes_over=takes_over)
    lock = new_lock()
    if LOCK_NAME in listed:
        client.put(LOCK_NAME, lock)
    elif not client.create(LOCK_NAME, lock):
        problem = "another process has begun to write here"
        raise OutputError(client.url, problem, f"choose another {Parameter('out')}", code="output.contended")
    client = client.settled()
    if not listed:
        target = ObjectTarget(client, lock, CompletedObjects(plan, lock, wanted, last))
        target.open_beside(lambda: unfinished_objects(client, list_objects(client)))
        return target
    target = ObjectTarget(client, lock)
    try:
        listed_now = list_objects(client)  # some may have come before the lock, and its writer may have finished
        is_unfinished = is_unfinished and not has_ended(listed, listed_now, record.last if record else MANIFEST_NAME)
        abandoned = unfinished_objects(client, listed_now, recorded, is_unfinished=is_unfinished, takes_over=takes_over)
        names = {*wanted, *recorded, *abandoned}  # no kill may make them forgotten, and some may come late
        progress = CompletedObjects(plan, lock, names, last)
        completed = unfinished.completed(listed_now) if unfinished is not None else {}
        if progress.names:
            progress.add(client, completed)
    except BaseException:
        if not is_unfinished:  # otherwise the lock is kept, and the completed objects with it
            target.abort()
        raise
    target = ObjectTarget(client, lock, progress, completed)
    target.check_lock()  # another process may have resumed it meanwhile, and written some of these again
    # If this fails halfway, the lock stays: the prefix is unfinished now.
    remove_objects(client, abandoned - completed.keys())
    return target


class ObjectTarget:
    """An output under construction. Leaving its `with` block before `commit` keeps the objects that were completed.

    With a plan, that is, of which any was: then the same plan is resumed. Otherwise all that was written is removed.
    """

    def __init__(
        self,
        client: ObstoreClient,
        lock: bytes,
        progress: CompletedObjects | None = None,
        completed: Mapping[str, ObjectEntry] | None = None,
    ) -> None:
        self._client, self.lock = client, lock
        self._progress = progress or CompletedObjects("", lock)
        self._reusable = dict(completed or {})
        self._nbytes: dict[str, int] = {}
        self._etags: dict[str, str | None] = {}
        self._writers: list[ObjectWriter] = []
        self._may_be_committed = False
        self._beside = WaitingPool(NUM_AT_ONCE, "beside")
        self._sent = deque[Future[None]]()  # small files, and those that are being sent
        self._records: list[Future[None]] = []  # of completed objects; nothing waits for them but the end
        self._opening = Future[None]()  # until then, no object may appear
        self._opening.set_result(None)

    def open_beside(self, check: Callable[[], object]) -> None:
        """Check what came before the lock, and record the names, while the first parts are sent."""

        def open_now() -> None:
            check()
            if self._progress.names:
                self._progress.add(self._client, {})

        self._opening = self._beside.submit(open_now)
        self._sent.append(self._opening)

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def is_resumable(self) -> bool:
        """Whether the next run of the same plan can reuse completed objects."""
        self._settle_records()
        return bool(self._progress.plan) and self._progress.has_work

    def forget(self) -> None:
        """Make a failure remove completed objects too."""
        self._progress.plan = ""

    def completed(self, name: str, nbytes: int, head_nbytes: int) -> bytes | None:
        """Reuse an object that an earlier run completed and return its first bytes; None if there is none."""
        entry = self._reusable.pop(name, None)
        if entry is None or entry.nbytes != nbytes:
            return None
        self._nbytes[name], self._etags[name] = nbytes, entry.etag
        return b"".join(self._client.read(entry, 0, head_nbytes))

    def put(self, name: str, data: bytes) -> None:
        self.check_lock()
        self._nbytes[name] = len(data)  # an interrupt may come right after the object has
        self._etags[name] = self._client.put(name, data).etag

    def note(self, name: str, nbytes: int, etag: str | None) -> None:
        """Note an object that another process has written under this lock, so that `commit` looks for it."""
        self._nbytes[name], self._etags[name] = nbytes, etag

    def copy(self, name: str, blocks: Blocks) -> None:
        """Write a file of any length.

        A small one is in memory when this returns, and sent while others are. Its failure is raised later: at the next
        call, by `writer`, or by `commit`.
        """
        if blocks.nbytes <= SMALL_NBYTES:
            data = b"".join(map(bytes, blocks))
            self._wait_for_small(_MOST_SENT - 1)
            self._sent.append(self._beside.submit(self.put, name, data))
        else:
            self.check_lock()
            self._nbytes[name] = blocks.nbytes
            self._client.writer(name, blocks.nbytes, self.check_lock).write_all(blocks)
            self._etags[name] = self._client.look_up(name).etag

    def writer(self, name: str, nbytes: int, header: bytes, num_parts: int = NUM_PARTS) -> ObjectWriter:
        """Begin an object of `nbytes`, of which `header` is the start. Several may be open at a time."""
        for sent in tuple(self._sent):
            if sent.done():
                sent.result()
        writer = self._client.writer(name, nbytes, self.check_lock, lambda: self._completed(name), num_parts)
        self._nbytes[name], self._etags[name] = nbytes, None
        self._writers.append(writer)
        writer.write(memoryview(header), 0, len(header), 0)
        return writer

    def written(self) -> dict[str, ObjectEntry]:
        """Return the current entries of the completed objects, once small files are sent."""
        self._wait_for_small()
        self.check_lock()
        return {name: entry for name, entry in list_objects(self._client).items() if name in self._nbytes}

    def commit(self, data: bytes, name: str = MANIFEST_NAME) -> None:
        """Write the file that commits the output, after everything else is complete."""
        assert not any(writer.is_open for writer in self._writers)
        self._wait_for_small()
        self._settle_records()
        is_ours = self._beside.submit(self.check_lock)
        listed = list_objects(self._client)
        is_ours.result()
        for written, nbytes in self._nbytes.items():
            where = f"{self._client.url}/{written}"
            nbytes_there = listed[written].nbytes if written in listed else 0
            if written not in listed or nbytes_there != nbytes:
                problem = f"{nbytes} bytes were written, the store has {nbytes_there}"
                raise OutputError(where, problem, code="output.lost-object")
            etags = {self._etags.get(written), listed[written].etag} - {None}
            if len(etags) > 1:  # a writer that was taken over had it on its way
                problem = "another process has replaced it"
                raise OutputError(where, problem, "stop that process, and run again", code="output.contended")
        problem = "already exists: another process has finished here"
        done = OutputError(self._client.url, problem, f"choose another {Parameter('out')}", code="output.contended")
        if name in listed:
            raise done
        # From here on nothing is removed: whether a write without an answer took place is not known.
        self._may_be_committed = True
        # Commit point: readers ignore a prefix without manifest.json, and refuse a locked one.
        if not self._client.create(name, data):
            raise done
        try:
            others = {PROGRESS_NAME, *self._progress.names} - self._nbytes.keys()  # what writers before sent late
            remove_objects(self._client, [*(others & listed.keys()), LOCK_NAME])
        except InputError as error:  # not allowed to, perhaps
            if name != MANIFEST_NAME:  # readers would take it for unfinished
                raise
            logger.warning("%s is complete, but more than that stays there: %s", self._client.url, error.problem)

    def abort(self) -> None:
        """Abandon unfinished uploads, and keep or remove the rest, as far as the store still lets us."""
        for writer in self._writers:
            writer.close()
        self._beside.shutdown()  # what is sent after the rest was removed would stay
        if self._opening.exception() is not None:  # then all that is there but the lock is of others
            self._nbytes.clear()
            self._progress.names = frozenset()
            self._opening = Future()
            self._opening.set_result(None)
        try:
            self.check_lock()
            if self.is_resumable:
                self._progress.stop(self._client)
                return
            listed = list_objects(self._client)
            written = {*self._nbytes, *self._reusable, *self._progress.names, PROGRESS_NAME}  # what came late, too
            remove_objects(self._client, [*(written & listed.keys()), LOCK_NAME])
        except InputError as error:
            logger.warning("%s: what was written of it may have been left there: %s", self._client.url, error.problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._may_be_committed or (error is not None and self.is_resumable):
            self.abort()
        self._beside.shutdown()

    def _completed(self, name: str) -> None:
        if self._progress.plan:
            self._records.append(self._beside.submit(self._record, name))

    def _record(self, name: str) -> None:
        entry = self._client.look_up(name)
        self._etags[name] = entry.etag
        self._progress.add(self._client, {name: entry})

    def _wait_for_small(self, most: int = 0) -> None:
        """Wait until at most so many small files are being sent."""
        while len(self._sent) > most:
            self._sent.popleft().result()

    def _settle_records(self) -> None:
        """Wait until completed objects are recorded. One that could not be is sent again if the output is resumed."""
        for failed in filter(None, (record.exception() for record in self._records)):
            logger.debug("%s: a completed object is not recorded: %s", self.url, failed)

    def check_lock(self) -> None:
        """Raise unless the lock is ours, and the prefix: otherwise nothing may be written here."""
        self._opening.result()
        check_lock(self._client, self.lock)
