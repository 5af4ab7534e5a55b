"""What every store gives: folders of named files, read by byte ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from manifests.digest import digest_bytes
from manifests.errors import InputError
from manifests.safetensors import Header, header_nbytes, parse_header

__all__ = [
    "HIDDEN_FOLDERS",
    "Folder",
    "InputFile",
    "Range",
    "Reader",
    "is_hidden",
    "merge_ranges",
    "read_file_header",
    "read_whole",
]

HIDDEN_FOLDERS = (".git", ".cache")  # what tools keep beside a model, for themselves

_LENGTH_NBYTES = 8  # of a safetensors file: the length of its header
_MAX_WHOLE_NBYTES = 1 << 30

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
    def pin(self) -> str:
        """What changes when the file's bytes do: its size and etag, or its size and time of change."""
        ...

    def open(self, ranges: Sequence[Range]) -> Reader:
        """Open the file to read these ranges, given in ascending order, and nothing else."""
        ...


class Folder(Protocol):
    """A folder of a store, as it stood when it was opened: a revision is pinned once."""

    @property
    def kind(self) -> str: ...
    @property
    def location(self) -> str: ...
    @property
    def revision(self) -> str | None: ...

    def names(self) -> tuple[str, ...]:
        """Give the path of every file below the folder, "/" between parts, sorted."""
        ...

    def file(self, name: str) -> InputFile: ...


def is_hidden(path: str) -> bool:
    """Tell whether a path leads through a hidden folder: such files are no part of a model."""
    return not set(HIDDEN_FOLDERS).isdisjoint(path.split("/")[:-1])


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Give the same bytes as fewer ranges, ascending: those that touch or overlap become one."""
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def read_whole(file: InputFile, digest: str | None = None) -> bytes:
    """Read a file of at most 1 GiB, and check its digest when one is given.

    Raises:
        InputError: it cannot be read, is too large, or is not what the digest says.
    """
    if file.nbytes > _MAX_WHOLE_NBYTES:
        raise InputError(str(file), f"expected at most {_MAX_WHOLE_NBYTES} bytes, found {file.nbytes}")
    data = _read(file, 0, file.nbytes)
    if digest is not None and digest_bytes(data) != digest:
        raise InputError(
            str(file),
            f"expected {digest}, found {digest_bytes(data)}",
            "the file was changed or damaged after it was written",
        )
    return data


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


def _read(file: InputFile, begin: int, end: int) -> bytes:
    data = bytearray(end - begin)
    reader = file.open(((begin, end),))
    try:
        reader.read_into(memoryview(data), begin)
    finally:
        reader.close()
    return bytes(data)
