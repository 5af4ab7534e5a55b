"""What every store offers: folders of named files, read by byte ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol, runtime_checkable

from manifests.digest import PREFIX, Hasher, digest_bytes
from manifests.errors import SourceError
from manifests.jsontext import MAX_CONFIG_NBYTES, parse_config
from manifests.safetensors import Header, header_nbytes, parse_header

__all__ = [
    "HIDDEN_FOLDERS",
    "HUB_MISMATCH",
    "SOURCE_CHANGED",
    "Blocks",
    "Folder",
    "InputFile",
    "Listed",
    "Range",
    "Reader",
    "check_whole",
    "is_hidden",
    "merge_ranges",
    "read_config",
    "read_file_header",
    "read_whole",
]

SOURCE_CHANGED = "source.changed"  # the code of errors about a file that is no longer what was listed
HUB_MISMATCH = "source.hub-digest"  # of errors about a file that is not what the hub lists
HIDDEN_FOLDERS = (".git", ".cache")  # what tools keep beside a model, for themselves

_LENGTH_NBYTES = 8  # of a safetensors file: the length of its header
_MAX_WHOLE_NBYTES = 1 << 30
_BLOCK_NBYTES = 1 << 20

Range = tuple[int, int]  # begin and end, in bytes from the start of the file


class Reader(Protocol):
    """An open file. One thread reads it, mostly from front to back."""

    def read_into(self, part: memoryview, position: int) -> None:
        """Fill `part` with the bytes at `position`.

        Raises:
            InputError: the file ends before that, changed since it was listed, or cannot be read.
        """
        ...

    def close(self) -> None: ...


class InputFile(Protocol):
    """A file that can be read. Hashable; `str()` names it in messages."""

    @property
    def nbytes(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """What changes when the file's bytes do: its size and etag, or its size and time of change."""
        ...

    def open(self, ranges: Sequence[Range]) -> Reader:
        """Open the file to read these ranges, given in ascending order, and nothing else."""
        ...


@runtime_checkable
class Listed(Protocol):
    """A file whose place lists a digest of its bytes: SHA-256, or git's SHA-1; "" where it lists none."""

    @property
    def listed(self) -> str: ...


class Folder(Protocol):
    """A folder of a store, as it was when it was opened: its revision is resolved once."""

    @property
    def kind(self) -> str: ...
    @property
    def location(self) -> str: ...
    @property
    def revision(self) -> str | None: ...

    def names(self) -> tuple[str, ...]:
        """Return the path of every file below the folder, "/" between parts, sorted."""
        ...

    def file(self, name: str) -> InputFile: ...


def is_hidden(path: str) -> bool:
    """Return whether a path leads through a hidden folder: such files are not part of a model."""
    return not set(HIDDEN_FOLDERS).isdisjoint(path.split("/")[:-1])


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the same bytes as fewer ranges, ascending: those that touch or overlap become one."""
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def read_config(file: InputFile, digest: str | None = None) -> dict[str, Any]:
    """Read a config, of a model or a tokenizer, and check its digest when one is given.

    Raises:
        InputError: it cannot be read, is longer than any config, does not match the digest, or is not an object.
    """
    return parse_config(read_whole(file, digest, most_nbytes=MAX_CONFIG_NBYTES), str(file))


def read_whole(file: InputFile, digest: str | None = None, *, most_nbytes: int = _MAX_WHOLE_NBYTES) -> bytes:
    """Read a file of at most 1 GiB, and check its digest when one is given; see `Blocks` for longer ones.

    Raises:
        InputError: it cannot be read, is too large, or is not what the digest says.
    """
    if file.nbytes > most_nbytes:
        problem = f"expected at most {most_nbytes} bytes, found {file.nbytes}"
        raise SourceError(str(file), problem, code="source.file-too-large")
    data = _read(file, 0, file.nbytes)
    if digest is not None:
        _check_digest(file, digest, digest_bytes(data))
    if (hasher := _listed_hasher(file)) is not None:
        hasher.update(data)
        _check_listed(file, hasher.hexdigest())
    return data


def check_whole(file: InputFile, digest: str) -> None:
    """Read a file of any length, a block at a time, and check its digest.

    Raises:
        InputError: it cannot be read, or is not what the digest says.
    """
    for _ in Blocks(file, digest):
        pass


class Blocks:
    """A file from front to back, a block at a time, each valid until the next; hashed as they pass.

    `digest` is known once all of them have passed. One that was `expected` is checked after the last block.

    Raises:
        InputError: the file cannot be read, or is not what the digest says.
    """

    def __init__(self, file: InputFile, expected: str | None = None) -> None:
        self.file, self.nbytes, self.expected = file, file.nbytes, expected
        self.digest = ""

    def __iter__(self) -> Iterator[memoryview]:
        buffer, hasher = memoryview(bytearray(min(self.nbytes, _BLOCK_NBYTES))), Hasher()
        listed = _listed_hasher(self.file)
        with closing(self.file.open(((0, self.nbytes),))) as reader:
            for begin in range(0, self.nbytes, _BLOCK_NBYTES):
                block = buffer[: min(_BLOCK_NBYTES, self.nbytes - begin)]
                reader.read_into(block, begin)
                hasher.update(block)
                if listed is not None:
                    listed.update(block)
                yield block
        if listed is not None:
            _check_listed(self.file, listed.hexdigest())
        self.digest = PREFIX + hasher.hexdigest()
        if self.expected is not None:
            _check_digest(self.file, self.expected, self.digest)


def read_file_header(file: InputFile) -> Header:
    """Read and check the header of a safetensors file: two ranges, and no byte of data.

    Raises:
        InputError: as `manifests.safetensors.read_header`.
    """
    where = str(file)
    first = _read(file, 0, min(_LENGTH_NBYTES, file.nbytes))
    raw_nbytes = header_nbytes(first, file.nbytes, where)
    raw = _read(file, _LENGTH_NBYTES, _LENGTH_NBYTES + raw_nbytes)
    return parse_header(raw, data_nbytes=file.nbytes - _LENGTH_NBYTES - raw_nbytes, where=where)


def _listed_hasher(file: InputFile) -> hashlib._Hash | None:
    """Return a hasher for the digest that is listed of a file: SHA-256, or git's SHA-1 for small files."""
    listed = file.listed if isinstance(file, Listed) else ""
    if len(listed) == 64:
        return hashlib.sha256()
    if len(listed) == 40:
        return hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)
    return None


def _check_listed(file: InputFile, found: str) -> None:
    listed = file.listed if isinstance(file, Listed) else ""
    if found != listed:
        raise SourceError(
            str(file),
            f"expected the digest {listed} (the hub's listing), found {found}",
            "a server or proxy on the way sent other bytes: run again, or from another network",
            code=HUB_MISMATCH,
        )


def _check_digest(file: InputFile, expected: str, found: str) -> None:
    if found != expected:
        raise SourceError(
            str(file),
            f"expected {expected}, found {found}",
            "the file was changed or damaged after it was written",
            code="source.digest-mismatch",
        )


def _read(file: InputFile, begin: int, end: int) -> bytes:
    data = bytearray(end - begin)
    reader = file.open(((begin, end),))
    try:
        reader.read_into(memoryview(data), begin)
    finally:
        reader.close()
    return bytes(data)
