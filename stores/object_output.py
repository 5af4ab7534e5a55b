"""Checkpoints written into a bucket: every object whole or absent, manifest.json last.

A bucket renames nothing, so an output takes shape under its own name, behind a claim: an object that keeps
others from writing there and says that the rest is unfinished. Multipart uploads send their parts in order
(obstore offers nothing else), so a shard's header, which stands first and holds the digests, must be known
before its data: hash, then upload.

Memory: `NUM_PARTS` + 1 parts for each open writer: 40 MiB for an object of up to 78 GiB, more for longer ones.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection
from types import TracebackType
from typing import TYPE_CHECKING, Self

from manifests.errors import InputError
from manifests.invariants import MANIFEST_NAME
from stores.object_client import SCHEMES, ObstoreClient, open_client, split_url
from stores.object_errors import explained
from stores.objects import CLAIM_NAME, list_objects

if TYPE_CHECKING:
    from obstore import WritableFile

__all__ = ["MAX_PARTS", "NUM_PARTS", "ObjectTarget", "ObjectWriter", "open_output", "part_nbytes"]

logger = logging.getLogger(__name__)

NUM_PARTS = 4  # under way at a time
_PART_NBYTES = 8 << 20
MAX_PARTS = 10_000  # of one object, in S3 and Google Cloud Storage
_MIB = 1 << 20


def open_output(
    url: str, *, force: bool = False, is_ours: Callable[[Collection[str]], bool] = lambda names: MANIFEST_NAME in names
) -> ObjectTarget:
    """Claim a prefix of a bucket for an output, and empty it if it is to be replaced.

    With `force`, an unfinished output is taken over, and one whose names `is_ours` recognises is removed:
    unlike a folder's, it is gone before the new one is there.

    Raises:
        InputError: something lies there that may not be replaced, another process is writing there, or the
            bucket does not exist, cannot be reached or may not be written.
    """
    if split_url(url)[0] not in SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise InputError(url, f"cannot be written: expected a folder here, or one of {schemes}")
    client = open_client(url)
    names = set(list_objects(client))
    is_unfinished = CLAIM_NAME in names and MANIFEST_NAME not in names
    others = names - {CLAIM_NAME}
    _check_replaceable(client.url, others, is_unfinished, force, is_ours)
    target = ObjectTarget(client, take_over=CLAIM_NAME in names)
    try:
        others = set(list_objects(client)) - {CLAIM_NAME}  # some may have come before the claim
        _check_replaceable(client.url, others, is_unfinished, force, is_ours)
    except BaseException:
        target.abort()
        raise
    _remove(client, others)  # when it stops halfway, the claim stays: this is unfinished now
    return target


class ObjectTarget:
    """An output under construction. Leaving its `with` block before `commit` removes what was written."""

    def __init__(self, client: ObstoreClient, *, take_over: bool) -> None:
        self._client = client
        self._nbytes: dict[str, int] = {}
        self._writers: list[ObjectWriter] = []
        self._may_be_committed = False
        # Unlike any other claim, so that its etag is too.
        claim = f"A command is writing here, or was interrupted: there is no {MANIFEST_NAME}.\n{uuid.uuid4()}\n"
        if take_over:
            with explained(client.url):
                self._claim = client.quick.put(CLAIM_NAME, claim.encode())["e_tag"]
        else:
            self._claim = self._create(CLAIM_NAME, claim.encode(), "another process has begun to write here")

    def put(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with explained(self._where(name)):
            self._client.patient.put(name, data)
        self._nbytes[name] = len(data)

    def writer(self, name: str, nbytes: int, header: bytes) -> ObjectWriter:
        """Begin an object of `nbytes`, of which `header` is the start. Several may be open at a time."""
        import obstore

        store, size = self._client.patient, part_nbytes(nbytes)
        with explained(self._where(name)):
            file = obstore.open_writer(store, name, buffer_size=size, max_concurrency=NUM_PARTS)
        self._nbytes[name] = nbytes
        self._writers.append(ObjectWriter(self._where(name), file, nbytes))
        self._writers[-1].write(memoryview(header), 0, len(header), 0)
        return self._writers[-1]

    def commit(self, data: bytes, name: str = MANIFEST_NAME) -> None:
        """Write the file that makes the output one: everything else is there, whole.

        Raises:
            InputError: another process took the prefix over or has committed there, or an object is missing.
        """
        assert not any(writer.is_open for writer in self._writers)
        self._check_claim()
        listed = list_objects(self._client)
        for written, nbytes in self._nbytes.items():
            found = listed[written].nbytes if written in listed else 0
            if written not in listed or found != nbytes:
                raise InputError(self._where(written), f"{nbytes} bytes were written, the store has {found}")
        done = "exists already: another process has finished here"
        if name in listed:
            raise InputError(self._client.url, done, "choose another --out")
        # Commit point: readers ignore a prefix without manifest.json, and refuse a claimed one.
        # From here on nothing is removed: whether a write without an answer took place is not known.
        self._may_be_committed = True
        self._create(name, data, done)
        try:
            _remove(self._client, [CLAIM_NAME])
        except InputError as error:  # not allowed to, perhaps
            if name != MANIFEST_NAME:
                raise
            logger.warning("%s is complete, but %s stays there: %s", self._client.url, CLAIM_NAME, error)

    def abort(self) -> None:
        """Abandon unfinished uploads and remove what was written, as far as the store still lets us."""
        for writer in self._writers:
            writer.close()
        try:
            self._check_claim()
            _remove(self._client, self._nbytes)
            _remove(self._client, [CLAIM_NAME])
        except InputError as error:
            logger.warning("%s: what was written of it may have been left there: %s", self._client.url, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._may_be_committed:
            self.abort()

    def _create(self, name: str, data: bytes, problem: str) -> str | None:
        """Write an object that must not exist, and give its etag."""
        from obstore.exceptions import AlreadyExistsError

        store = self._client.quick if name == CLAIM_NAME else self._client.patient
        with explained(self._where(name)):
            try:
                return store.put(name, data, mode="create")["e_tag"]
            except AlreadyExistsError as error:
                found = store.get(name)
                if bytes(found.bytes()) == data:  # ours: it was written, the answer was lost, and obstore asked again
                    return found.meta["e_tag"]
                raise InputError(self._client.url, problem, "choose another --out") from error
            except NotImplementedError:  # AWS_CONDITIONAL_PUT=disabled: it was not there when it was looked for
                return store.put(name, data)["e_tag"]

    def _check_claim(self) -> None:
        claim = self._client.look_up(CLAIM_NAME)
        if self._claim is not None and claim.etag != self._claim.strip('"'):
            raise InputError(self._client.url, "another process took it over with --force", "choose another --out")

    def _where(self, name: str) -> str:
        return f"{self._client.url}/{name}"


class ObjectWriter:
    """One object under construction: written from its first byte to its last, there once it is finished."""

    def __init__(self, where: str, file: WritableFile, nbytes: int) -> None:
        self._where = where
        self._file = file
        self._nbytes = nbytes
        self._position = 0
        self.is_open = True

    def write(self, buffer: memoryview, begin: int, end: int, position: int) -> None:
        """Write `buffer[begin:end]` at `position`, where the last piece ended. The buffer is free afterwards."""
        assert position == self._position, f"{self._where}: {position} after {self._position}"
        with explained(self._where):
            self._file.write(bytes(buffer[begin:end]))  # a copy: it is sent later
        self._position += end - begin

    def finish(self) -> None:
        """Complete the upload: the object is there, or this raises."""
        assert self._position == self._nbytes, f"{self._where}: {self._position} of {self._nbytes} bytes"
        self.is_open = False
        with explained(self._where):
            self._file.close()  # when it fails, obstore has aborted the upload

    def close(self) -> None:
        """Abandon the upload unless it is finished; closing twice does no harm."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            with explained(self._where):
                self._file.__exit__(KeyboardInterrupt, None, None)  # leaving its block by an error aborts
        except InputError as error:
            logger.warning("an unfinished upload, which takes space and is not listed, may be left: %s", error)


def part_nbytes(nbytes: int) -> int:
    """Give the size of the parts in which an object of `nbytes` is sent."""
    return max(_PART_NBYTES, -(-nbytes // MAX_PARTS // _MIB) * _MIB)


def _check_replaceable(
    url: str, names: Collection[str], is_unfinished: bool, force: bool, is_ours: Callable[[Collection[str]], bool]
) -> None:
    if not names and not is_unfinished:
        return
    if not force and is_unfinished:
        raise InputError(
            url,
            "is being written by another command, or was left unfinished by one",
            "wait for that one, or start over with --force",
        )
    if not force:
        raise InputError(url, "exists already", "choose another --out, or replace it with --force")
    if not is_unfinished and not is_ours(names):
        raise InputError(
            url,
            "exists, and is not what this command writes; --force does not replace it",
            "choose another --out, or remove it yourself",
        )


def _remove(client: ObstoreClient, names: Collection[str]) -> None:
    """Remove objects, manifest.json before all others: what is left is no checkpoint."""
    for batch in ([name for name in names if name == MANIFEST_NAME], [name for name in names if name != MANIFEST_NAME]):
        if batch:
            with explained(client.url):
                client.patient.delete(batch)
