"""Files whose writer recorded the CRC-32 of byte ranges, which is compared as these are read, by whoever reads them.

Threads and requests read a record in pieces of any length and order, so CRCs of pieces are combined.

Source: zlib 1.3.1, crc32.c (`crc32_combine`).
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING
from zlib import crc32

from manifests.errors import SourceError
from reshard.tensors.lazy import DerivedFile
from stores.base import InputFile, Range, Reader, read_in_blocks
from stores.prefetch import RemoteFile

if TYPE_CHECKING:
    from stores.bundles import TensorAt
    from stores.net.retries import Streams
    from stores.prefetch import Fetch

_POLYNOMIAL = 0xEDB88320
_ONE, _X8 = 1 << 31, 1 << 23  # bits are reflected: the highest is the coefficient of x**0


def combined_crc(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two adjacent pieces, given that of each and the length of the second."""
    return _product(_shift(second_nbytes), first) ^ second


def bad_checksum(file: InputFile, name: str, begin: int, expected: int, crc: int) -> SourceError:
    """Return the error for a record whose bytes are not those that were written."""
    return SourceError(
        f"{file}: record {name[:80]!r} at byte {begin}",
        f"expected CRC-32 {expected:08x}, found {crc:08x}",
        "the file is damaged; copy or download it again, or save the checkpoint again",
        code="source.checksum-mismatch",
    )


@dataclass(slots=True)
class _Piece:
    """Bytes that were read, and their CRC-32; None while a thread computes it, from that of the `before` first ones."""

    begin: int
    end: int
    crc: int | None = None
    before: int = 0


class _Record:
    """A range of a file, and what is read of it so far: pieces in ascending order, adjacent ones combined."""

    def __init__(self, name: str, begin: int, end: int, crc: int) -> None:
        self.name, self.begin, self.end, self.crc = name, begin, end, crc
        self.pieces: list[_Piece] = []

    def gaps(self, begin: int, end: int) -> list[Range]:
        gaps = []
        for piece in self.pieces:
            if piece.begin >= end:
                break
            if piece.end > begin:
                if piece.begin > begin:
                    gaps.append((begin, piece.begin))
                begin = piece.end
        return [*gaps, (begin, end)] if begin < end else gaps

    def reserve(self, begin: int, end: int) -> list[tuple[_Piece, int, int]]:
        """Return the parts of a range that were not read, each with the piece that it extends or is."""
        parts = []
        for first, last in self.gaps(begin, end):
            at = bisect_left(self.pieces, first, key=attrgetter("begin"))
            piece = self.pieces[at - 1] if at else None
            if piece is not None and piece.end == first and piece.crc is not None:
                piece.end, piece.before, piece.crc = last, piece.crc, None
            else:
                piece = _Piece(first, last)
                self.pieces.insert(at, piece)
            parts.append((piece, first, last))
        return parts

    def fill(self, piece: _Piece, crc: int) -> bool:
        """Set the CRC of a reserved piece; return whether it was the last one of the record."""
        piece.crc = crc
        at = bisect_left(self.pieces, piece.begin, key=attrgetter("begin"))
        self._join(at)
        self._join(at - 1)
        whole = self.pieces[0]
        return (whole.begin, whole.end) == (self.begin, self.end) and whole.crc is not None

    def _join(self, at: int) -> None:
        """Combine a piece with the next, if they are adjacent and have CRCs."""
        if 0 <= at < len(self.pieces) - 1:
            first, second = self.pieces[at : at + 2]
            if first.end == second.begin and first.crc is not None and second.crc is not None:
                crc = combined_crc(first.crc, second.crc, second.end - second.begin)
                self.pieces[at : at + 2] = [_Piece(first.begin, second.end, crc)]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedFile:
    """A file with records, each of which is compared with its CRC-32 when the last of its bytes have been read."""

    stored: InputFile
    _records: list[_Record] = field(default_factory=list, repr=False)  # in ascending order
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __str__(self) -> str:
        return str(self.stored)

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    @property
    def fingerprint(self) -> str:
        return self.stored.fingerprint

    def add(self, name: str, begin: int, end: int, crc: int) -> None:
        """Expect this CRC-32 of a range, before anything is read of it."""
        if begin < end:
            insort(self._records, _Record(name, begin, end, crc), key=attrgetter("begin"))

    def open(self, ranges: Sequence[Range]) -> Reader:
        return _VerifyingReader(self, self.stored.open(ranges))

    def verify(self, data: memoryview, position: int) -> None:
        """Take bytes that were read into account, and compare the records of which they are the last ones."""
        for record in self._overlapping(position, position + len(data)):
            begin, end = max(position, record.begin), min(position + len(data), record.end)
            with self._lock:
                reserved = record.reserve(begin, end)
            for piece, first, last in reserved:
                crc = crc32(data[first - position : last - position], piece.before)
                with self._lock:
                    is_complete = record.fill(piece, crc)
                if is_complete and (read_crc := record.pieces[0].crc or 0) != record.crc:
                    raise bad_checksum(self.stored, record.name, record.begin, record.crc, read_crc)

    def complete(self, begin: int, end: int) -> None:
        """Read what was not read of records of which a range is a part, so that they are compared."""
        for record in self._overlapping(begin, end):
            gaps = record.gaps(record.begin, record.end)
            if not gaps or (begin <= record.begin and record.end <= end):  # read whole, now or by an interrupted run
                continue
            for _ in read_in_blocks(self, gaps):  # which verifies them
                pass

    def _overlapping(self, begin: int, end: int) -> Iterator[_Record]:
        first = max(0, bisect_right(self._records, begin, key=attrgetter("begin")) - 1)
        for number in range(first, len(self._records)):
            record = self._records[number]
            if record.begin >= end:
                break
            if record.end > begin:
                yield record


@dataclass(frozen=True, slots=True, eq=False)
class _RemoteRecordedFile(RecordedFile):
    """One whose ranges are fetched in concurrent requests."""

    @property
    def streams(self) -> Streams:
        assert isinstance(self.stored, RemoteFile)
        return self.stored.streams

    def fetching(self) -> Fetch | None:
        assert isinstance(self.stored, RemoteFile)
        fetch = self.stored.fetching()
        return None if fetch is None else lambda into, position, stop: self._fetch(fetch, into, position, stop)

    def _fetch(self, fetch: Fetch, into: memoryview, position: int, stop: threading.Event) -> None:
        fetch(into, position, stop)
        self.verify(into, position)


def with_records(file: InputFile) -> RecordedFile:
    return _RemoteRecordedFile(file) if isinstance(file, RemoteFile) else RecordedFile(file)


def stored_file(file: InputFile) -> InputFile:
    return file.stored if isinstance(file, RecordedFile) else file


def verify_records(tensors: Iterable[TensorAt]) -> None:
    """Compare each record of which some of these tensors, which have been read, are parts; read the rest of it."""
    for tensor in tensors:
        if isinstance(tensor.file, DerivedFile):
            verify_records(tensor.file.origins)
        elif isinstance(tensor.file, RecordedFile):
            tensor.file.complete(tensor.begin, tensor.end)


class _VerifyingReader:
    def __init__(self, file: RecordedFile, reader: Reader) -> None:
        self._file, self._reader, self.close = file, reader, reader.close

    def read_into(self, part: memoryview, position: int) -> None:
        self._reader.read_into(part, position)
        self._file.verify(part, position)


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """Return x**(8 * nbytes) modulo the polynomial of CRC-32."""
    power, square = _ONE, _X8
    while nbytes:
        if nbytes & 1:
            power = _product(power, square)
        square, nbytes = _product(square, square), nbytes >> 1
    return power


def _product(first: int, second: int) -> int:
    """Return the product of two polynomials, of which the first is not zero, modulo that of CRC-32."""
    product, bit = 0, _ONE
    while True:
        if first & bit:
            product ^= second
            if not first & (bit - 1):
                return product
        bit >>= 1
        second = (second >> 1) ^ _POLYNOMIAL if second & 1 else second >> 1
