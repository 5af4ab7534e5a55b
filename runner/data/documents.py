"""The documents of a source from any position, in the order of its files or shuffled.

Shuffling and sampling have no state: they are pure functions, the same on every rank, machine and version.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from manifests.schema import SourcePosition
from runner.config.schema import DataOptions
from runner.data.files import (
    LINES,
    ROWS,
    Document,
    file_nbytes,
    find_files,
    line_document,
    line_offsets,
    read_documents,
    row_document,
)
from runner.data.parquet import group_sizes, read_group
from runner.data.rows import Fields, RowForm, fields_of

_NUM_LINES = 256  # read between two beats
_NUM_ROUNDS = 6
_LEAST_HALF = 4  # bits: in a smaller domain, some permutations would be much more frequent than others


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedDocument:
    """A document, its position, and the position after it."""

    document: Document
    begin: SourcePosition
    after: SourcePosition


class DocumentSource(Protocol):
    """Documents, grouped in items that are read in some order in each epoch."""

    name: str
    num_items: int

    def read(self, position: SourcePosition) -> Iterator[PlacedDocument]:
        """Yield the documents of the item at a position, from the position's offset on."""


def open_sources(
    data: DataOptions, row: RowForm | None = None, beat: Callable[[], None] = lambda: None
) -> tuple[DocumentSource, ...]:
    """Open the sources to draw documents from: each by itself if they have weights, otherwise all as one.

    `row` is the form of their rows, if they are rows of token ids. `beat` is called as files are read, and may raise.
    """
    sources: list[DocumentSource] = []
    fields = fields_of(data, row)
    for number, names in enumerate(data.groups):
        files, name = find_files(names), ", ".join(names)
        if data.shuffle:
            items = [_items_in(file, beat) for file in files]
            sources.append(_Shuffled(name, files, items, fields, (data.seed, number)))
        else:
            sources.append(_InOrder(name, files, fields))
    return tuple(sources)


class _InOrder:
    """Documents in the order of their files. An item is a file."""

    def __init__(self, name: str, files: Sequence[Path], fields: Fields) -> None:
        self.name, self.num_items = name, len(files)
        self._files, self._fields = files, fields

    def read(self, position: SourcePosition) -> Iterator[PlacedDocument]:
        for document in read_documents(self._files[position.item], self._fields, position.offset):
            begin, after = _at(position, document.begin), _at(position, document.end)
            yield PlacedDocument(document=document, begin=begin, after=after)


class _Shuffled:
    """Shuffled documents. An item is a document or, as single rows cannot be read alone, a Parquet row group.

    Items are `shuffled` in each epoch, with seed, source and epoch as the key; so are the rows within a row group,
    with the item's number appended to the key.
    """

    def __init__(
        self, name: str, files: Sequence[Path], items: Sequence[Sequence[int]], fields: Fields, key: tuple[int, ...]
    ) -> None:
        self.name = name
        self._files, self._items, self._fields, self._key = files, items, fields, key
        self._ends = list(accumulate(map(len, self._items)))
        self.num_items = self._ends[-1]

    def read(self, position: SourcePosition) -> Iterator[PlacedDocument]:
        key = (*self._key, position.epoch)
        item = shuffled(position.item, self.num_items, *key)
        number = bisect_right(self._ends, item)
        file, items = self._files[number], self._items[number]
        index = item - self._ends[number] + len(items)
        after = SourcePosition(epoch=position.epoch, item=position.item + 1, offset=0)
        if file.suffix == ROWS:
            yield from self._read_group(position, file, index, items[index], (*key, item))
        elif file.suffix == LINES:
            end = items[index + 1] if index + 1 < len(items) else file_nbytes(file)
            document = line_document(file, self._fields, items[index], end)
            yield PlacedDocument(document=document, begin=_at(position, 0), after=after)
        else:
            for document in read_documents(file, self._fields, position.offset):
                yield PlacedDocument(document=document, begin=position, after=after)

    def _read_group(
        self, position: SourcePosition, file: Path, group: int, num_rows: int, key: tuple[int, ...]
    ) -> Iterator[PlacedDocument]:
        places = range(position.offset, num_rows)
        order = (shuffled(place, num_rows, *key) for place in places)
        for place, (row, value) in zip(places, read_group(file, self._fields, group, num_rows, order), strict=True):
            document = row_document(file, self._fields, row, value)
            yield PlacedDocument(document=document, begin=_at(position, place), after=_at(position, place + 1))


def shuffled(place: int, count: int, *key: int) -> int:
    """Return the number at a place of the pseudorandom permutation of range(count) that the key selects.

    The permutation is never in memory. It is a Feistel network: of the place as a number of 2h bits, with 4^h >= count
    and h >= 4, the upper half a and the lower half b become b and a ^ F(b), in six rounds; all six are repeated until
    the result is below `count`. In round r, counted from 0, F(b) is the lowest h bits of blake2b, 8 bytes,
    little-endian, of the text "KEY r b": decimal numbers separated by spaces.
    """
    half = max(_LEAST_HALF, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        upper, lower = place >> half, place & mask
        for number in range(_NUM_ROUNDS):
            upper, lower = lower, upper ^ (_stir(*key, number, lower) & mask)
        place = upper << half | lower
        if place < count:
            return place


def draw(weights: Sequence[float], *key: int) -> int:
    """Return an index of `weights`, pseudorandom by key, with probability proportional to its weight.

    It is the first index whose cumulative weight is above u times the sum of all weights: u is the upper 53 bits of
    blake2b, 8 bytes, little-endian, of the key as decimal numbers separated by spaces, divided by 2^53.
    """
    sums = list(accumulate(weights))
    point = (_stir(*key) >> 11) / 2**53 * sums[-1]
    return next(place for place, end in enumerate(sums) if point < end)


def _at(position: SourcePosition, offset: int) -> SourcePosition:
    """Return a position with another offset; `replace` takes several times as long."""
    return SourcePosition(epoch=position.epoch, item=position.item, offset=offset)


def _items_in(file: Path, beat: Callable[[], None]) -> Sequence[int]:
    """Return the items of a file: the offset of each line, the number of rows of each row group, or one item."""
    beat()
    if file.suffix == LINES:
        offsets = array("Q")  # 8 bytes each
        for offset in line_offsets(file):
            offsets.append(offset)
            if len(offsets) % _NUM_LINES == 0:
                beat()
        return offsets
    return group_sizes(file) if file.suffix == ROWS else (0,)


def _stir(*numbers: int) -> int:
    return int.from_bytes(blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest(), "little")
