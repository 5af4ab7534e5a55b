"""The interface of all stores: folders of named files, read by byte ranges."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from manifests.digest import PREFIX, Hasher, digest_bytes
from manifests.errors import SourceError
from manifests.jsontext import MAX_CONFIG_NBYTES, parse_config
from manifests.safetensors import LENGTH_NBYTES, Header, header_nbytes, parse_header

if TYPE_CHECKING:
    import hashlib
    from pathlib import Path

SOURCE_CHANGED = "source.changed"  # error code: the file changed since it was listed
HUB_MISMATCH = "source.hub-digest"  # error code: the file differs from the hub's listing
LOCK_NAME = ".reshard-unfinished"  # exists in a prefix from before the first write until the commit
PROGRESS_NAME = ".reshard-progress"  # beside the lock: the completed objects
PART_NAME = ".reshard-part"  # completes an attempt at a part of a pack
HIDDEN_FOLDERS = (".git", ".cache", "lost+found")  # of tools and file systems, beside a model

MAX_WHOLE_NBYTES = 1 << 30
_BLOCK_NBYTES = 1 << 20
_HEAD_NBYTES = 128 << 10  # of a shard: most headers are shorter, and over a network another request takes longer

Range = tuple[int, int]  # begin and end, in bytes from the start of the file


class Reader(Protocol):
    """An open file. It is read by one thread, mostly sequentially."""

    def read_into(self, part: memoryview, position: int) -> None:
        """Fill `part` with the bytes at `position`."""

    def close(self) -> None: ...


class InputFile(Protocol):
    """A file that can be read. Hashable; `str()` names it in messages."""

    @property
    def nbytes(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """A string that changes with the file's bytes: its size and ETag, or its size and mtime."""

    def open(self, ranges: Sequence[Range]) -> Reader:
        """Open the file to read these ranges, in ascending order."""


@runtime_checkable
class Listed(Protocol):
    """A file whose store lists a digest of its bytes: SHA-256, git's SHA-1, or "" if unknown."""

    @property
    def listed(self) -> str: ...

    def cached_path(self) -> Path | None:
        """Return the copy in the local cache that is read in its place, if there is one."""


class Folder(Protocol):
    """A folder of a store, with its revision resolved when it was opened."""

    @property
    def kind(self) -> str: ...
    @property
    def location(self) -> str: ...
    @property
    def revision(self) -> str | None: ...

    def names(self) -> tuple[str, ...]:
        """Return the path of every file below the folder, "/" between parts, sorted."""

    def file(self, name: str) -> InputFile: ...


def is_hidden(path: str) -> bool:
    """Return whether a path is in a hidden folder, whose files are not part of a model."""
    return not set(HIDDEN_FOLDERS).isdisjoint(path.split("/")[:-1])


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Merge ranges that touch or overlap, and return them in ascending order."""
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def read_config(file: InputFile, digest: str | None = None) -> dict[str, Any]:
    """Read a config, of a model or a tokenizer, and check its digest when one is given."""
    return parse_config(read_whole(file, digest, most_nbytes=MAX_CONFIG_NBYTES), str(file))


def read_whole(file: InputFile, digest: str | None = None, *, most_nbytes: int = MAX_WHOLE_NBYTES) -> bytes:
    """Read a file of at most 1 GiB, and check its digest if one is passed; see `Blocks` for longer files."""
    if file.nbytes > most_nbytes:
        problem = f"expected at most {most_nbytes} bytes, found {file.nbytes}"
        raise SourceError(str(file), problem, code="source.file-too-large")
    data = read_range(file, 0, file.nbytes)
    if digest is not None:
        _check_digest(file, digest, digest_bytes(data))
    if (hasher := _listed_hasher(file)) is not None:
        hasher.update(data)
        _check_listed(file, hasher.hexdigest())
    return data


def check_whole(file: InputFile, digest: str | None = None) -> str:
    """Read a file of any length, a block at a time, and return its digest, which is checked if one is passed."""
    blocks = Blocks(file, digest)
    for _ in blocks:
        pass
    return blocks.digest


def read_in_blocks(file: InputFile, ranges: Sequence[Range], step: int = _BLOCK_NBYTES) -> Generator[memoryview]:
    """Yield the bytes of ranges, `step` at a time and fewer at the end of each. A block is valid until the next."""
    buffer = memoryview(bytearray(min(step, max(last - first for first, last in ranges))))
    with closing(file.open(ranges)) as reader:
        for first, last in ranges:
            for begin in range(first, last, step):
                block = buffer[: min(step, last - begin)]
                reader.read_into(block, begin)
                yield block


class Blocks:
    """Iterate over a file's blocks and hash them; each block is valid until the next.

    `digest` is set after the last block, and checked if one is `expected`.
    """

    def __init__(self, file: InputFile, expected: str | None = None) -> None:
        self.file, self.nbytes, self.expected = file, file.nbytes, expected
        self.digest = ""

    def __iter__(self) -> Iterator[memoryview]:
        hasher, listed = Hasher(), _listed_hasher(self.file)
        for block in read_in_blocks(self.file, ((0, self.nbytes),)):
            hasher.update(block)
            if listed is not None:
                listed.update(block)
            yield block
        if listed is not None:
            _check_listed(self.file, listed.hexdigest())
        self.digest = PREFIX + hasher.hexdigest()
        if self.expected is not None:
            _check_digest(self.file, self.expected, self.digest)


def read_head(file: InputFile) -> bytes:
    """Return the first bytes of a shard, which have all of most headers."""
    return read_range(file, 0, min(_HEAD_NBYTES, file.nbytes))


def read_file_header(file: InputFile, head: bytes | None = None) -> Header:
    """Read and check the header of a safetensors file: in one request, or two if it is long.

    `head` is what `read_head` returned, if it was called.
    """
    where = str(file)
    first = read_head(file) if head is None else head
    raw_nbytes = header_nbytes(first[:LENGTH_NBYTES], file.nbytes, where)
    end = LENGTH_NBYTES + raw_nbytes
    raw = first[LENGTH_NBYTES:end]
    if end > len(first):
        raw += read_range(file, len(first), end)
    return parse_header(raw, data_nbytes=file.nbytes - LENGTH_NBYTES - raw_nbytes, where=where)


def _listed_hasher(file: InputFile) -> hashlib._Hash | None:
    """Return a hasher for the listed digest of a file: SHA-256, or git's SHA-1 for small files."""
    listed = file.listed if isinstance(file, Listed) else ""
    if not listed:
        return None
    import hashlib  # OpenSSL's

    if len(listed) == 64:
        return hashlib.sha256()
    if len(listed) == 40:
        return hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)
    return None


def _check_listed(file: InputFile, digest: str) -> None:
    listed = file.listed if isinstance(file, Listed) else ""
    if digest != listed:
        raise hub_mismatch(file, f"expected {listed} (listing of the hub), found {digest}")


def hub_mismatch(file: InputFile | Listed, problem: str) -> SourceError:
    """Return the error of a file that differs from the hub's listing, with what to do about where it was read."""
    cached = file.cached_path() if isinstance(file, Listed) else None
    hint = "a server or proxy sent wrong bytes; run again, or from another network"
    if cached is not None:
        hint = f"the copy in the local Hugging Face cache is damaged; remove {cached.resolve()}, then run again"
    return SourceError(str(file), problem, hint, code=HUB_MISMATCH)


def _check_digest(file: InputFile, expected: str, digest: str) -> None:
    if digest != expected:
        raise SourceError(
            str(file),
            f"expected {expected}, found {digest}",
            "the file was changed or damaged after it was written",
            code="source.digest-mismatch",
        )


def read_range(file: InputFile, begin: int, end: int) -> bytes:
    """Return bytes `begin` to `end` of a file."""
    data = io.BytesIO(bytes(end - begin))
    with closing(file.open(((begin, end),))) as reader, data.getbuffer() as part:
        reader.read_into(part, begin)
    return data.getvalue()  # no copy
