"""Tokenizing documents once for several ranks: each takes a part, and all get the ids of all.

# Note [Shared tokenization]
Where a sequence begins depends on the lengths of all documents before it, so no rank can tokenize its own rows alone.
Ranks that need data therefore read the same documents in rounds. In each, they assign the next documents, or pieces of
long ones, to the rank with the least text so far; each tokenizes its part, and all gather ids and errors. Everything
after that (frames, drawing from sources, cursors, packing) is the same pure function of the same ids on every rank, as
it is on a rank that is alone. A short document is parsed by the rank that tokenizes it, and by no other.

A rank sends None instead of its part when it stops reading. That round is the last one of all ranks, so that none waits
for another that has left. Ranks are never more than one round apart, because a round ends on none before all take part.
"""

from __future__ import annotations

import heapq
import threading
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Protocol, TypeVar

from manifests.errors import DataError, UserError
from runner.data.documents import PlacedDocument
from runner.data.files import Document, Piece
from runner.data.rows import TokenIds
from runner.data.tokenizer import Pieces, Tokenized, TokenRows, Vocabulary

_SHORT_NBYTES = 256 << 10  # of a document that is assigned whole: a longer one is assigned by pieces
_LEAST_NBYTES, _MOST_NBYTES = 4 << 10, 256 << 10  # of text for each rank in a round: it doubles from the first on
_LEAST_PART_NBYTES = 1 << 10  # counted for a part in a round, whose number of parts is so bounded
_PART_NBYTES = 64  # of text that takes as long to tokenize as a part takes besides

T = TypeVar("T")


class StoppedReading(Exception):
    """A rank has stopped reading, and so all have."""


class Exchange(Protocol):
    """The ranks that read the same data; `label` names this one."""

    rank: int
    size: int
    label: str

    def gather(self, value: T) -> Sequence[T]:
        """Return the value of each rank; all of them call this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A document or a piece of one; `placed` is None at the end of an epoch, and where nothing follows."""

    number: int  # of the document
    placed: PlacedDocument | None = None
    text: Document | None = None  # to tokenize
    failure: UserError | None = None  # why nothing follows

    @property
    def nbytes(self) -> int:
        return 0 if self.text is None else self.text.nbytes

    @property
    def position(self) -> str:
        if self.placed is None:
            return f"{self.failure is None}"
        document = self.placed.document
        return f"{document.file.name} {document.begin} {document.end} {self.nbytes}"


@dataclass(kw_only=True, slots=True)
class _Share:
    """What one rank has tokenized in a round, and the state of its files."""

    position: int  # a digest of the positions of all parts
    failure: UserError | None  # why nothing follows
    ids: TokenIds = field(default_factory=lambda: array("i"))  # of its pieces, end to end
    pieces: list[tuple[int, int, int]] = field(default_factory=list)  # part, offset, number of ids
    errors: dict[int, UserError] = field(default_factory=dict)  # by part

    def add(self, part: int, pieces: Pieces) -> None:
        try:
            for offset, ids in pieces:
                self.pieces.append((part, offset, len(ids)))
                self.ids += ids
        except UserError as error:
            self.errors[part] = error


class SharedTokenization:
    """Tokenizes with other ranks: a `Tokenize` that all ranks of the exchange call with the same documents."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._loads = [(0, rank) for rank in range(exchange.size)]  # a heap
        self._is_stopped = threading.Event()

    def __call__(self, vocabulary: Vocabulary | TokenRows, documents: Iterator[PlacedDocument | None]) -> Tokenized:
        source = _Source(documents)
        for number, group in groupby(self._rounds(source, vocabulary), key=lambda tokenized: tokenized[0].number):
            yield _join(group)
            source.num_passed = number + 1

    def stop(self) -> None:
        """Ask to stop reading, from any thread: the next round is the last."""
        self._is_stopped.set()

    def leave(self) -> None:
        """Take part in the last round."""
        self._exchange.gather(None)

    def _rounds(self, source: _Source, vocabulary: Vocabulary | TokenRows) -> Iterator[tuple[_Part, Pieces]]:
        """Yield all parts of a source with their ids."""
        nbytes, remaining = _LEAST_NBYTES, source.parts()
        while parts := tuple(_next_parts(remaining, nbytes * self._exchange.size)):
            position = zlib.crc32("\n".join(part.position for part in parts).encode())
            failure = parts[-1].failure
            share = _Share(position=position, failure=failure and failure.on_rank(self._exchange.label))
            for index, text in self._assigned(parts):
                if self._is_stopped.is_set():
                    break
                share.add(index, vocabulary.tokenize(text))
            shares = self._exchange.gather(None if self._is_stopped.is_set() else share)
            yield from zip(parts, self._merge(parts, shares), strict=True)
            nbytes = min(2 * nbytes, _MOST_NBYTES)

    def _assigned(self, parts: Sequence[_Part]) -> list[tuple[int, Document]]:
        """Return the texts that this rank tokenizes, by index of their part."""
        assigned = []
        for index, part in enumerate(parts):
            if part.text is not None:
                load, rank = self._loads[0]
                heapq.heapreplace(self._loads, (load + part.nbytes + _PART_NBYTES, rank))
                if rank == self._exchange.rank:
                    assigned.append((index, part.text))
        return assigned

    def _merge(self, parts: Sequence[_Part], shares: Sequence[_Share | None]) -> Iterator[Pieces]:
        """Return the pieces of each part, whichever rank has tokenized it."""
        merged: list[list[tuple[int, TokenIds]]] = [[] for _ in parts]
        errors: dict[int, UserError] = {}
        for share in self._checked(parts, shares):
            begin = 0
            for index, offset, num_ids in share.pieces:
                merged[index].append((offset, share.ids[begin : begin + num_ids]))
                begin += num_ids
            errors |= share.errors
        return (_raising(pieces, errors.get(index)) for index, pieces in enumerate(merged))

    def _checked(self, parts: Sequence[_Part], shares: Sequence[_Share | None]) -> list[_Share]:
        """Return what each rank has tokenized, of the same documents on all.

        Raises:
            StoppedReading: a rank has stopped.
            UserError: only some ranks cannot read on, or their files differ.
        """
        read = [share for share in shares if share is not None]
        if len(read) < len(shares):
            raise StoppedReading
        if len({share.position for share in read}) == 1:
            return read
        for rank, share in enumerate(read):
            if share.failure is not None:
                share.failure.is_elsewhere = rank != self._exchange.rank
                raise share.failure
        names = [str(part.placed.document.file) for part in parts if part.placed is not None]
        problem = "ranks have read other documents from it, or from a file near it"
        hint = "every node must see the same files: a copy on the node's own disk may be outdated"
        raise DataError(names[0] if names else "--data", problem, hint, code="data.differs-between-ranks")


class _Source:
    """The documents of a source in parts; `num_passed` documents are done, so that the rest of them is not read."""

    def __init__(self, documents: Iterator[PlacedDocument | None]) -> None:
        self._documents, self.num_passed = documents, 0

    def parts(self) -> Iterator[_Part]:
        number = -1
        try:
            for number, placed in enumerate(self._documents):
                if placed is None:
                    yield _Part(number=number)
                elif placed.document.nbytes <= _SHORT_NBYTES:
                    yield _Part(number=number, placed=placed, text=placed.document)
                else:
                    yield from self._pieces(number, placed)
        except UserError as error:
            yield _Part(number=number + 1, failure=error)

    def _pieces(self, number: int, placed: PlacedDocument) -> Iterator[_Part]:
        document = placed.document
        pieces, error = iter(document.pieces), None
        while error is None and number >= self.num_passed:
            piece: tuple[tuple[int, Piece], ...] = ()
            try:
                piece = (next(pieces),)
            except StopIteration:
                return
            except UserError as caught:
                error = caught
            text = replace(document, nbytes=sum(len(more) for _, more in piece), pieces=_raising(piece, error))
            yield _Part(number=number, placed=placed, text=text)


def _join(parts: Iterator[tuple[_Part, Pieces]]) -> tuple[PlacedDocument, Pieces] | None:
    """Return the document of these parts with its ids; None at the end of an epoch."""
    part, pieces = next(parts)
    if part.failure is not None:
        raise part.failure
    if part.placed is None:
        return None
    return part.placed, chain(pieces, chain.from_iterable(more for _, more in parts))


def _next_parts(parts: Iterator[_Part], most_nbytes: int) -> Iterator[_Part]:
    nbytes = 0
    while nbytes < most_nbytes and (part := next(parts, None)) is not None:
        yield part
        nbytes += max(part.nbytes, _LEAST_PART_NBYTES)


def _raising(items: Sequence[T], error: UserError | None) -> Iterator[T]:
    """Yield the items, then raise the error, if there is one."""
    yield from items
    if error is not None:
        raise error
