"""Reading batches with several ranks: each tokenizes a part of the documents, and gets its rows.

# Note [Shared reading]
Where a sequence begins depends on the lengths of all documents before it, so no rank can tokenize its own rows alone.
The first of the ranks that need data reads the documents, in rounds: in each, it assigns the next documents, or pieces
of long ones, to the rank with the least work so far, which for itself includes the reading. Each rank tokenizes its
part, of which it parses whole documents, and reads shuffled lines from its own file; it sends back ids and errors.
Everything after that (frames, drawing from sources, cursors, packing) runs on the first rank as on a rank that is
alone; it sends each rank its rows of every batch.

The other ranks wait for one message after the other: texts to tokenize, rows of a batch, an error, or the end. A rank
that stops reading answers None to the next texts, and takes part until the end comes, so that none waits for another
that has left.
"""

from __future__ import annotations

import heapq
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import Any, Protocol, TypeVar

from manifests.errors import UserError
from runner.data.documents import PlacedDocument
from runner.data.files import Document, Piece
from runner.data.rows import BadDocumentError, TokenIds
from runner.data.tokenizer import Pieces, Tokenized, TokenRows, Vocabulary

_WHOLE_NBYTES = 256 << 10  # of a document that is assigned whole: a longer one is assigned by pieces
_LEAST_NBYTES, _MOST_NBYTES = 4 << 10, 256 << 10  # of text for each rank in a round: it doubles from the first on
_LEAST_PART_NBYTES = 1 << 10  # counted for a part in a round, whose number of parts is so bounded
_PART_NBYTES = 64  # of text that takes as long to tokenize as a part takes besides
_READING = 1 / 8  # of the time to tokenize a part: what the first rank does with it besides

T = TypeVar("T")
R = TypeVar("R")
P = TypeVar("P")


class StoppedReading(Exception):
    """A rank has stopped reading, and so all have."""


class Exchange(Protocol):
    """The ranks that read the same data; all of them call each method. `label` names this one."""

    rank: int
    size: int
    label: str

    def gather(self, value: T) -> Sequence[T]:
        """Return the value of each rank."""

    def collect(self, value: T) -> Sequence[T]:
        """Return the value of each rank on the first, and nothing on the others."""

    def scatter(self, values: Sequence[T]) -> T:
        """Return this rank's value of those of the first rank; the others have none."""


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


@dataclass(kw_only=True, slots=True)
class _Share:
    """What one rank has tokenized in a round."""

    ids: TokenIds = field(default_factory=lambda: array("i"))  # of its pieces, end to end
    pieces: list[tuple[int, int, int]] = field(default_factory=list)  # part, offset, number of ids
    errors: dict[int, UserError] = field(default_factory=dict)  # by part

    def add(self, part: int, pieces: Pieces, rank: str) -> None:
        try:
            for offset, ids in pieces:
                self.pieces.append((part, offset, len(ids)))
                self.ids += ids
        except BadDocumentError as error:  # identical on each rank
            self.errors[part] = error
        except UserError as error:
            self.errors[part] = error.on_rank(rank)


@dataclass(frozen=True, slots=True)
class _Texts:
    """What a rank tokenizes, by index of its part."""

    assigned: Sequence[tuple[int, Document]]


class SharedReading:
    """Reads with other ranks. The first one of the exchange `lead`s, and tokenizes by a call; the others `follow`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._loads = [(0.0, rank) for rank in range(exchange.size)]  # a heap
        self._reading = 0.0  # the first rank's work that is not in its load
        self._is_stopped, self._has_ended = threading.Event(), False

    @property
    def is_first(self) -> bool:
        return self._exchange.rank == 0

    def __call__(self, vocabulary: Vocabulary | TokenRows, documents: Iterator[PlacedDocument | None]) -> Tokenized:
        source = _Source(documents, self._exchange.label)
        for number, group in groupby(self._rounds(source, vocabulary), key=lambda tokenized: tokenized[0].number):
            yield _join(group)
            source.num_passed = number + 1

    def lead(self, batches: Iterable[T], select: Callable[[T, Sequence[R]], Sequence[P]], rows: R) -> Iterator[P]:
        """Yield the rows of each batch that this rank needs, and send the others theirs, which `select` returns."""
        rows_of_ranks = self._exchange.gather(rows)
        try:
            for batch in batches:
                yield self._exchange.scatter(select(batch, rows_of_ranks))
        except UserError as error:
            self._end(error.on_rank(self._exchange.label))
            raise

    def follow(self, vocabulary: Vocabulary | TokenRows, rows: Any) -> Iterator[Any]:
        """Yield this rank's part of each batch, and tokenize meanwhile."""
        self._exchange.gather(rows)
        while True:
            message = self._receive(vocabulary)
            if message is None:
                raise StoppedReading
            if isinstance(message, UserError):
                message.is_elsewhere = True
                raise message
            yield message

    def stop(self) -> None:
        """Ask to stop reading, from any thread: this rank tokenizes no more, and the first ends all."""
        self._is_stopped.set()

    def leave(self) -> None:
        """Take part until the end."""
        self.stop()
        if self.is_first and not self._has_ended:
            self._end(None)
        while not self._has_ended:
            self._receive(None)

    def _end(self, error: UserError | None) -> None:
        self._has_ended = True
        self._exchange.scatter([error] * self._exchange.size)

    def _receive(self, vocabulary: Vocabulary | TokenRows | None) -> Any:
        """Return the next message for the reader, and tokenize texts until it comes."""
        message: Any
        while isinstance(message := self._exchange.scatter(()), _Texts):
            self._exchange.collect(self._tokenize(vocabulary, message))
        self._has_ended = message is None or isinstance(message, UserError)
        return message

    def _tokenize(self, vocabulary: Vocabulary | TokenRows | None, texts: _Texts) -> _Share | None:
        """Tokenize texts; None: this rank has stopped."""
        share = _Share()
        for part, text in texts.assigned:
            if self._is_stopped.is_set() or vocabulary is None:
                break
            share.add(part, vocabulary.tokenize(text), self._exchange.label)
        return None if self._is_stopped.is_set() else share

    def _rounds(self, source: _Source, vocabulary: Vocabulary | TokenRows) -> Iterator[tuple[_Part, Pieces]]:
        """Yield all parts of a source with their ids."""
        nbytes, remaining = _LEAST_NBYTES, source.parts()
        while parts := tuple(_next_parts(remaining, nbytes * self._exchange.size)):
            texts = self._exchange.scatter(self._assign(parts))
            shares = self._exchange.collect(self._tokenize(vocabulary, texts))
            if any(share is None for share in shares):
                self._end(None)
                raise StoppedReading
            yield from zip(parts, _merge(parts, [share for share in shares if share is not None]), strict=True)
            nbytes = min(2 * nbytes, _MOST_NBYTES)

    def _assign(self, parts: Sequence[_Part]) -> list[_Texts]:
        """Return the texts that each rank tokenizes."""
        assigned: list[list[tuple[int, Document]]] = [[] for _ in range(self._exchange.size)]
        for index, part in enumerate(parts):
            if part.text is not None:
                cost = part.nbytes + _PART_NBYTES
                self._reading += cost * _READING
                if self._loads[0][1] == 0:
                    heapq.heapreplace(self._loads, (self._loads[0][0] + self._reading, 0))
                    self._reading = 0.0
                load, rank = self._loads[0]
                heapq.heapreplace(self._loads, (load + cost, rank))
                assigned[rank].append((index, part.text))
        return [_Texts(texts) for texts in assigned]


def _merge(parts: Sequence[_Part], shares: Sequence[_Share]) -> Iterator[Pieces]:
    """Return the pieces of each part, whichever rank has tokenized it."""
    merged: list[list[tuple[int, TokenIds]]] = [[] for _ in parts]
    errors: dict[int, UserError] = {}
    for share in shares:
        begin = 0
        for index, offset, num_ids in share.pieces:
            merged[index].append((offset, share.ids[begin : begin + num_ids]))
            begin += num_ids
        errors |= share.errors
    return (_raising(pieces, errors.get(index)) for index, pieces in enumerate(merged))


class _Source:
    """The documents of a source in parts; `num_passed` documents are done, so that the rest of them is not read.

    `label` is of the rank that reads them.
    """

    def __init__(self, documents: Iterator[PlacedDocument | None], label: str) -> None:
        self._documents, self._label, self.num_passed = documents, label, 0

    def parts(self) -> Iterator[_Part]:
        number = -1
        try:
            for number, placed in enumerate(self._documents):
                if placed is None:
                    yield _Part(number=number)
                elif placed.document.nbytes <= _WHOLE_NBYTES and not placed.document.is_file:
                    yield _Part(number=number, placed=placed, text=placed.document)
                else:
                    yield from self._pieces(number, placed)
        except UserError as error:
            yield _Part(number=number + 1, failure=error)

    def _pieces(self, number: int, placed: PlacedDocument) -> Iterator[_Part]:
        document = placed.document
        pieces, error = document.pieces, None
        while error is None and number >= self.num_passed:
            piece: tuple[tuple[int, Piece], ...] = ()
            try:
                piece = (next(pieces),)
            except StopIteration:
                return
            except UserError as caught:  # of this rank's disk, whichever rank raises it
                error = caught if isinstance(caught, BadDocumentError) else caught.on_rank(self._label)
            nbytes = sum(len(more) for _, more in piece)
            text = replace(document, nbytes=nbytes, read=partial(_raising, piece, error))
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
