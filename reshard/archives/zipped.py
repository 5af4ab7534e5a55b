"""The entries of a zip file as byte ranges, after checking that they are uncompressed and do not overlap."""

from __future__ import annotations

import io
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from zlib import crc32

from manifests.errors import SourceError
from reshard.tensors.checksums import RecordedFile, bad_checksum
from stores.base import InputFile, Range, merge_ranges, read_range

_MAX_DIRECTORY_NBYTES = 64 << 20
_EDGE_NBYTES = 4096  # a file of one tensor has all but its bytes there
_BATCH = 512  # archives of which these are read at once
_LOCAL_NBYTES, _LOCAL_MAGIC = 30, b"PK\x03\x04"
_LISTED_NBYTES = 46  # of an entry in the directory, without its name
_ENCRYPTED = 1
_AGAIN = "the file is damaged or truncated; copy or download it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class ZipEntry:
    """An entry's bytes: `nbytes` from `begin` on, from the start of the file, and their CRC-32 if there is one."""

    name: str
    begin: int
    nbytes: int
    crc: int | None
    crc_at: Range  # where the directory has it, from the start of the archive

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


def read_entries(archive: Archive) -> dict[str, ZipEntry]:
    """Return the entries of a zip file, by name, without the folder that all of them are in."""
    file = archive.file
    try:
        with zipfile.ZipFile(archive) as opened:
            infos = sorted(opened.infolist(), key=lambda info: info.header_offset)
            directory_begin = opened.start_dir
            crcs_at = _checksums(archive, directory_begin, opened.infolist())
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OverflowError) as error:
        raise bad_archive(file, f"expected a zip file as torch.save writes it: {error}") from error
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise bad_archive(file, f"entry {info.filename[:80]!r} is compressed, which torch.save never does")
        if info.flag_bits & _ENCRYPTED or not 0 <= info.header_offset <= directory_begin - _LOCAL_NBYTES:
            raise bad_archive(file, f"entry {info.filename[:80]!r} is encrypted, or outside of the file")
    entries = _entries(archive, infos, crcs_at)
    ends = [archive.begin + end for end in (*(info.header_offset for info in infos), directory_begin)][1:]
    for entry, end in zip(entries, ends, strict=True):
        if entry.end > end:
            raise bad_archive(file, f"entry {entry.name[:80]!r} overlaps the next, or ends beyond the file")
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) < len(entries):
        raise bad_archive(file, "two entries have one name")
    archive.entries = by_name
    return by_name


def read_entry(archive: Archive, entry: ZipEntry, most_nbytes: int) -> bytes:
    if entry.nbytes > most_nbytes:
        problem = f"expected at most {most_nbytes} bytes in {entry.name!r}, found {entry.nbytes}"
        raise bad_archive(archive.file, problem)
    data = archive.read_range(entry.begin, entry.end)
    if entry.crc is not None and (crc := crc32(data)) != entry.crc:
        raise bad_checksum(archive.file, entry.name, entry.begin, entry.crc, crc)
    archive.checksums.remove(entry.crc_at)
    return data


def bad_archive(file: InputFile, problem: str) -> SourceError:
    return SourceError(str(file), problem, _AGAIN, code="source.bad-archive")


def _entries(archive: Archive, infos: Sequence[zipfile.ZipInfo], crcs_at: Mapping[str, Range]) -> list[ZipEntry]:
    """Return where the entries' bytes begin: after local headers, whose lengths only they say.

    There are no CRCs if all of them are 0: torch.serialization.set_crc32_options(False) writes that.
    """
    has_crcs = any(info.CRC for info in infos)
    entries = []
    begins = [archive.begin + info.header_offset for info in infos]
    locals_ = archive.read_ranges([(begin, begin + _LOCAL_NBYTES) for begin in begins])
    for info, header_begin, local in zip(infos, begins, locals_, strict=True):
        if local[:4] != _LOCAL_MAGIC:
            raise bad_archive(archive.file, f"entry {info.filename[:80]!r} has no local header")
        name_nbytes, extra_nbytes = (int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
        begin = header_begin + _LOCAL_NBYTES + name_nbytes + extra_nbytes
        entries.append(
            ZipEntry(
                name=info.filename.partition("/")[2],
                begin=begin,
                nbytes=info.file_size,
                crc=info.CRC if has_crcs else None,
                crc_at=crcs_at[info.filename],
            )
        )
    return entries


def _checksums(archive: Archive, directory_begin: int, infos: Sequence[zipfile.ZipInfo]) -> dict[str, Range]:
    """Return where the directory has the CRC of each entry; those in local headers are copies."""
    places = {}
    at = directory_begin
    for info in infos:
        archive.checksums.append((info.header_offset + 14, info.header_offset + 18))
        archive.checksums.append((at + 16, at + 20))
        places[info.filename] = at + 16, at + 20
        lengths = archive.read_range(archive.begin + at + 28, archive.begin + at + 34)  # of name, extra, comment
        at += _LISTED_NBYTES + sum(struct.unpack("<3H", lengths))
    return places


def archives_in(file: RecordedFile, parts: Sequence[Range]) -> Iterator[Archive]:
    """Yield the zip files that are parts of a file, in their order there. The ends of many are read at once."""
    ordered = sorted(parts)
    for first in range(0, len(ordered), _BATCH):
        batch = ordered[first : first + _BATCH]
        ranges = merge_ranges(edge for part in batch for edge in _edges(part))
        edges = _read_ranges(file, ranges)
        begins = [begin for begin, _ in edges]
        for part in batch:
            yield Archive(file, part, [edges[bisect_right(begins, begin) - 1] for begin, _ in _edges(part)])


def _edges(part: Range) -> tuple[Range, Range]:
    begin, end = part
    return (begin, min(end, begin + _EDGE_NBYTES)), (max(begin, end - _EDGE_NBYTES), end)


def _read_ranges(file: InputFile, ranges: Sequence[Range]) -> list[tuple[int, bytes]]:
    """Return the bytes of ranges in ascending order, which are read as one, each with where it begins."""
    pieces = []
    with closing(file.open(ranges)) as reader:
        for begin, end in ranges:
            data = bytearray(end - begin)
            reader.read_into(memoryview(data), begin)
            pieces.append((begin, bytes(data)))
    return pieces


class Archive(io.RawIOBase):
    """A zip file: all of `file`, or a part of it. What `zipfile` needs to read its directory.

    `edges` are its first and its last bytes, each with where they begin. It remembers its `entries`, which bytes were
    `used`, and where `checksums` are that were not compared, in bytes from its own beginning.
    """

    def __init__(self, file: RecordedFile, part: Range, edges: Sequence[tuple[int, bytes]]) -> None:
        self.file, (self.begin, self.end), self._at = file, part, 0
        self._edges = edges
        self.used: list[Range] = []
        self.checksums: list[Range] = []
        self.entries: dict[str, ZipEntry] = {}

    def read_range(self, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` of the file."""
        self.used.append((begin - self.begin, end - self.begin))
        data = self._in_memory(begin, end)
        return read_range(self.file, begin, end) if data is None else data

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of ranges in ascending order, which are read as one."""
        self.used += [(begin - self.begin, end - self.begin) for begin, end in ranges]
        read = {part: data for part in ranges if (data := self._in_memory(*part)) is not None}
        if missing := [part for part in ranges if part not in read]:
            read |= {(begin, begin + len(data)): data for begin, data in _read_ranges(self.file, missing)}
        return [read[part] for part in ranges]

    def has(self, pieces: Sequence[tuple[int, bytes]]) -> bool:
        """Return whether it has these bytes, each from a position on, and all of them are in memory."""
        for at, piece in pieces:
            first, data = self._edges[at >= _EDGE_NBYTES]
            position = self.begin + at - first
            if position < 0 or not data.startswith(piece, position):
                return False
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.end - self.begin}[whence]
        if self._at < 0:
            raise OSError("before the start of the file")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        remaining = max(0, self.end - self.begin - self._at)
        size = remaining if size is None or size < 0 else min(size, remaining)
        if size > _MAX_DIRECTORY_NBYTES:
            raise ValueError(f"a directory of {size} bytes")
        begin = self.begin + self._at
        self._at += size
        return self.read_range(begin, begin + size)

    def _in_memory(self, begin: int, end: int) -> bytes | None:
        for first, data in self._edges:
            if first <= begin and end <= first + len(data):
                return data[begin - first : end - first]
        return None
