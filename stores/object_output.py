"""Outputs in a bucket: every object whole or absent, the one that makes them a checkpoint last.

A bucket renames nothing, so an output takes shape under its own name, behind a claim: an object that keeps
others from writing there and says that the rest is unfinished. Uploads send their parts in order (obstore
offers nothing else), so a shard's header, which stands first and holds the digests, is known before its data.

Memory: `NUM_PARTS` + 1 parts for each open writer: 40 MiB for an object of up to 78 GiB, more for longer ones.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import Protocol, Self

from manifests.codec import decode_manifest
from manifests.errors import InputError
from manifests.invariants import MANIFEST_NAME
from stores.address import SCHEME as HUB_SCHEME
from stores.address import split_url
from stores.base import read_whole
from stores.object_client import SCHEMES, ObjectEntry, Upload, open_client
from stores.objects import CLAIM_NAME, Client, ObjectFile, list_objects

__all__ = ["ObjectTarget", "ObjectWriter", "open_output"]

logger = logging.getLogger(__name__)

_CLAIM_CHARS = 200  # of what a claim says, shown
_CLAIM_LINES = 3  # of a claim; names of what is to be removed may follow
_REMAINS = re.compile(r"packed-[0-9a-f]{12}/stage-\d+/.+\.safetensors")  # shards of ours, where nothing names them


class WritableClient(Client, Protocol):
    def put(self, name: str, data: bytes) -> None: ...
    def create(self, name: str, data: bytes) -> bool: ...
    def upload(self, name: str, nbytes: int) -> Upload: ...
    def remove(self, names: Collection[str]) -> None: ...


def open_output(
    url: str, *, force: bool = False, is_ours: Callable[[Collection[str]], bool] = lambda names: MANIFEST_NAME in names
) -> ObjectTarget:
    """Claim a prefix of a bucket for an output.

    With `force`, an output that has a manifest stays readable until the new one is committed, see `ObjectTarget`;
    what neither that manifest names nor a killed writer left of its own stays for good. An output without one, be
    it unfinished or recognised by `is_ours` by its names, is gone before the new one is there, and all that lies
    with it.

    Raises:
        InputError: something lies there that may not be replaced, another process is writing there, or the
            bucket does not exist, cannot be reached or may not be written.
    """
    client = _open_writable(url)
    listed = list_objects(client)
    is_unfinished = CLAIM_NAME in listed and MANIFEST_NAME not in listed
    _check_replaceable(client, listed, is_unfinished, force, is_ours)
    replaced = _replaced_before(client) if CLAIM_NAME in listed else []
    claim = _claim() + _lines(replaced)  # which no kill from here on makes forgotten
    if CLAIM_NAME in listed:
        client.put(CLAIM_NAME, claim)
    elif not client.create(CLAIM_NAME, claim):
        raise InputError(client.url, "another process has begun to write here", "choose another --out")
    target = ObjectTarget(client, claim, ())
    try:
        listed = list_objects(client)  # some may have come before the claim
        _check_replaceable(client, listed, is_unfinished, force, is_ours)
        listed.pop(CLAIM_NAME, None)
        old = _take_stock(client, listed, replaced) if MANIFEST_NAME in listed else ()
    except BaseException:
        target.abort()
        raise
    if old:
        return ObjectTarget(client, claim, old)
    _remove(client, listed)  # when it stops halfway, the claim stays: this is unfinished now
    return target


class ObjectTarget:
    """An output under construction. Leaving its `with` block before `commit` removes what was written.

    Where a manifest is replaced (`old`: itself and what it names), it stays whole and readable meanwhile: shards go
    below a folder of their own, and small files are kept in memory until the commit, which ends by writing the new
    manifest over the old one. What only the old one named is removed then; the claim lists it, for a kill.
    """

    def __init__(self, client: WritableClient, claim: bytes, old: Collection[str]) -> None:
        self._client, self._claim, self._old = client, claim, old
        self._folder = f"packed-{uuid.uuid4().hex[:12]}/" if old else ""
        self._nbytes: dict[str, int] = {}
        self._held: dict[str, bytes] = {}
        self._writers: list[ObjectWriter] = []
        self._may_be_committed = False

    def place(self, path: str) -> str:
        """Give the name under which a shard is to be written."""
        return self._folder + path

    def put(self, name: str, data: bytes) -> None:
        """Write a small file."""
        if self._old:
            self._held[name] = data
        else:
            self._check_claim()
            self._client.put(name, data)
            self._nbytes[name] = len(data)

    def writer(self, name: str, nbytes: int, header: bytes) -> ObjectWriter:
        """Begin an object of `nbytes`, of which `header` is the start. Several may be open at a time."""
        assert name not in self._old
        self._check_claim()
        where, upload = f"{self._client.url}/{name}", self._client.upload(name, nbytes)
        writer = ObjectWriter(where, upload, nbytes, self._check_claim)
        self._nbytes[name] = nbytes
        self._writers.append(writer)
        writer.write(memoryview(header), 0, len(header), 0)
        return writer

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
                where = f"{self._client.url}/{written}"
                raise InputError(where, f"{nbytes} bytes were written, the store has {found}")
        done = InputError(self._client.url, "exists already: another process has finished here", "choose another --out")
        if name in listed and not self._old:
            raise done
        gone = [old for old in self._old if old in listed and old not in {name, *self._nbytes, *self._held}]
        # Small files of the new manifest lie beside the old one until it is written.
        if left := [*gone, *(held for held in self._held if held not in listed)]:
            self._check_claim()
            claim = self._claim + _lines(left)
            self._client.put(CLAIM_NAME, claim)
            self._claim = claim
        # From here on nothing is removed: whether a write without an answer took place is not known.
        self._may_be_committed = True
        for held, content in self._held.items():
            if held not in listed or self._read(listed[held]) != content:
                self._client.put(held, content)
        # Commit point: readers ignore a prefix without manifest.json, and refuse a claimed one.
        if self._old:
            self._client.put(name, data)
        elif not self._client.create(name, data):
            raise done
        self._clear_away(gone, is_readable=name == MANIFEST_NAME)

    def abort(self) -> None:
        """Abandon unfinished uploads and remove what was written, as far as the store still lets us."""
        for writer in self._writers:
            writer.close()
        try:
            self._check_claim()
            _remove(self._client, [*(self._nbytes.keys() & list_objects(self._client).keys()), CLAIM_NAME])
        except InputError as error:
            logger.warning("%s: what was written of it may have been left there: %s", self._client.url, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._may_be_committed:
            self.abort()

    def _clear_away(self, gone: Iterable[str], *, is_readable: bool) -> None:
        """Remove what was replaced, then the claim."""
        try:
            _remove(self._client, [*gone, CLAIM_NAME])
        except InputError as error:  # not allowed to, perhaps
            if not is_readable:  # readers would take it for unfinished
                raise
            logger.warning("%s is complete, but more than that stays there: %s", self._client.url, error)

    def _check_claim(self) -> None:
        """Raise unless the claim is ours: once it is not, nothing of ours may come to lie here any more."""
        if self._read(self._client.look_up(CLAIM_NAME)) != self._claim:
            raise InputError(self._client.url, "another process took it over with --force", "choose another --out")

    def _read(self, entry: ObjectEntry) -> bytes:
        return b"".join(self._client.read(entry, 0, entry.nbytes)) if entry.nbytes else b""


class ObjectWriter:
    """One object under construction: written from its first byte to its last, there once it is finished.

    `check` raises when the prefix is no longer ours: others may have an object of this name by then.
    """

    def __init__(self, where: str, upload: Upload, nbytes: int, check: Callable[[], None]) -> None:
        self._where = where
        self._upload = upload
        self._nbytes = nbytes
        self._check = check
        self._position = 0
        self.is_open = True

    def write(self, buffer: memoryview, begin: int, end: int, position: int) -> None:
        """Write `buffer[begin:end]` at `position`, where the last piece ended. The buffer is free afterwards."""
        assert position == self._position, f"{self._where}: {position} after {self._position}"
        self._upload.write(bytes(buffer[begin:end]))  # a copy: it is sent later
        self._position += end - begin

    def finish(self) -> None:
        """Complete the upload: the object is there, or this raises."""
        assert self._position == self._nbytes, f"{self._where}: {self._position} of {self._nbytes} bytes"
        self._check()
        self.is_open = False
        self._upload.finish()

    def close(self) -> None:
        """Abandon the upload unless it is finished; closing twice does no harm."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            self._upload.abandon()
        except InputError as error:
            logger.warning("an unfinished upload, which takes space and is not listed, may be left: %s", error)


def _open_writable(url: str) -> WritableClient:
    if url.startswith(HUB_SCHEME):
        raise InputError(url, "the hub is not written", "give a folder as --out, then hf upload REPO FOLDER")
    if split_url(url)[0] in SCHEMES:
        return open_client(url)
    from stores.filesystem_client import open_filesystem

    client = open_filesystem(url)
    client.make_folder()
    return client


def _lines(names: Iterable[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()


def _claim() -> bytes:
    """Give a claim, unlike any other."""
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    who = f"begun {begun} on {socket.gethostname()} by process {os.getpid()}"
    return f"{who}\nA command is writing here, or was interrupted.\n{uuid.uuid4()}\n".encode()


def _check_replaceable(
    client: WritableClient,
    listed: Mapping[str, ObjectEntry],
    is_unfinished: bool,
    force: bool,
    is_ours: Callable[[Collection[str]], bool],
) -> None:
    others = {name: entry for name, entry in listed.items() if name != CLAIM_NAME}
    if not others and not is_unfinished:
        return
    if not force and is_unfinished:
        raise InputError(
            client.url,
            f"is being written by another command, or was left unfinished by one: {_what_lies_there(client, others)}",
            "wait for that one, or start over with --force",
        )
    if not force:
        raise InputError(client.url, "exists already", "choose another --out, or replace it with --force")
    if not is_unfinished and not is_ours(others):
        raise InputError(
            client.url,
            "exists, and is not what this command writes; --force does not replace it",
            "choose another --out, or remove it yourself",
        )
    if MANIFEST_NAME not in others:  # then all of them would go
        for name in others:
            folder, _, last = name.rpartition("/")
            if folder and last in (MANIFEST_NAME, CLAIM_NAME):
                raise InputError(
                    client.url,
                    f"holds another output, {folder}; --force does not remove that",
                    "choose another --out, or remove it yourself",
                )


def _take_stock(client: WritableClient, listed: Mapping[str, ObjectEntry], replaced: Collection[str]) -> set[str]:
    """Give the manifest and what it names; remove what killed writers had `replaced` by it, or written in vain."""
    file = ObjectFile(url=f"{client.url}/{MANIFEST_NAME}", entry=listed[MANIFEST_NAME], client=client)
    data = read_whole(file)
    try:
        manifest = decode_manifest(data, str(file))
    except InputError as error:
        logger.warning("whatever the manifest that is to be replaced names will stay there: %s", error)
        return {MANIFEST_NAME}
    named = {MANIFEST_NAME, *(shard.path for shard in manifest.shards), *(each.path for each in manifest.files)}
    remains = {name for name in listed if name in replaced or _REMAINS.fullmatch(name)} - named
    _remove(client, remains)
    return named


def _replaced_before(client: WritableClient) -> list[str]:
    """Give what the writer that had claimed the prefix was about to remove: it may be dead."""
    claim = client.look_up(CLAIM_NAME)
    text = b"".join(client.read(claim, 0, claim.nbytes)) if claim.nbytes else b""
    return [name for name in text.decode(errors="replace").split("\n")[_CLAIM_LINES:] if name]


def _what_lies_there(client: WritableClient, others: Mapping[str, ObjectEntry]) -> str:
    claim = client.look_up(CLAIM_NAME)
    text = b"".join(client.read(claim, 0, min(claim.nbytes, _CLAIM_CHARS))).decode(errors="replace")
    nbytes = sum(entry.nbytes for entry in others.values())
    return f"{len(others)} object{'' if len(others) == 1 else 's'}, {nbytes} bytes, {text.partition(chr(10))[0]}"


def _remove(client: WritableClient, names: Collection[str]) -> None:
    """Remove objects, manifest.json first and the claim last: what is left in between is unfinished."""
    order = {MANIFEST_NAME: 0, CLAIM_NAME: 2}
    for turn in range(3):
        if batch := [name for name in names if order.get(name, 1) == turn]:
            client.remove(batch)
