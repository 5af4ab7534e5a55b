"""Drawing documents from several sources, and the cursor of each of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from manifests.errors import DataError, InputError
from manifests.schema import DataCursor, SourcePosition
from runner.config.schema import DataOptions
from runner.data.documents import DocumentSource, PlacedDocument, draw
from runner.data.rows import Skipped, TokenIds
from runner.data.tokenizer import Pieces, Tokenize, Tokenized, TokenRows, Vocabulary, tokenize_alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor(DataCursor):
    """A position in the data, and the number of documents that were skipped before it."""

    num_skipped: int = 0

    @property
    def plain(self) -> DataCursor:
        """The position alone, as in a manifest."""
        return DataCursor(num_documents=self.num_documents, num_tokens=self.num_tokens, sources=self.sources)

    def later(self, num_tokens: int) -> Cursor:
        """Return the cursor so many tokens later in the same document; `replace` takes several times as long."""
        return Cursor(
            num_documents=self.num_documents,
            num_tokens=self.num_tokens + num_tokens,
            sources=self.sources,
            num_skipped=self.num_skipped,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """A document's ids, piece by piece, each with the cursor of its first id; and the cursor after them.

    `number` counts all documents that the reader of its source has passed, those without a token included.
    """

    number: int
    runs: Iterator[tuple[Cursor, TokenIds]]
    skipped: Skipped | None
    following: Cursor

    @property
    def after(self) -> Cursor:
        """The cursor after the document, once its ids have been read."""
        return replace(self.following, num_skipped=_num(self.skipped))


def first_cursor(num_sources: int) -> DataCursor:
    """Return the cursor at which the data begins."""
    return DataCursor(num_documents=0, num_tokens=0, sources=num_sources * (_first_position(0),))


def draw_documents(
    data: DataOptions, sources: Sequence[DocumentSource], vocabulary: Vocabulary | TokenRows, cursor: DataCursor, *,
    is_endless: bool, skipped: Skipped | None, tokenize: Tokenize = tokenize_alone,
) -> Iterator[Drawn]:  # fmt: skip
    """Yield the documents with any token from a cursor on, for one epoch of each source or without end.

    The next source depends only on the seed and the document's number. With `skipped`, invalid documents are counted
    there and have no number.
    """
    positions, num_consumed = list(cursor.sources), cursor.num_tokens
    epochs = [_read_epochs(*start, is_endless=is_endless) for start in zip(sources, positions, strict=True)]
    readers = [
        _read_text(source, position, vocabulary, skipped, tokenize(vocabulary, documents))
        for source, position, documents in zip(sources, positions, epochs, strict=True)
    ]
    for number in count(cursor.num_documents):
        chosen = draw(data.weights, data.seed, number) if len(sources) > 1 else 0
        if (following := next(readers[chosen], None)) is None:
            return
        passed, placed, pieces = following
        positions[chosen] = placed.begin
        begin = Cursor(num_documents=number, num_tokens=0, sources=tuple(positions), num_skipped=_num(skipped))
        positions[chosen] = placed.after
        runs = _placed(pieces, begin, chosen, placed.document.begin)
        yield Drawn(
            number=passed,
            runs=_skip(runs, num_consumed, sources[chosen]) if num_consumed else runs,
            skipped=skipped,
            following=Cursor(num_documents=number + 1, num_tokens=0, sources=tuple(positions)),
        )
        num_consumed = 0


def _read_epochs(
    source: DocumentSource, position: SourcePosition, *, is_endless: bool
) -> Iterator[PlacedDocument | None]:
    """Yield the documents of a source from a position on, and None after each epoch."""
    if position.item > source.num_items:
        raise _nothing_at(source)
    while True:
        for item in range(position.item, source.num_items):
            offset = position.offset if item == position.item else 0
            yield from source.read(replace(position, item=item, offset=offset))
        yield None
        if not is_endless:
            return
        position = _first_position(position.epoch + 1)


def _read_text(
    source: DocumentSource,
    position: SourcePosition,
    vocabulary: Vocabulary | TokenRows,
    skipped: Skipped | None,
    documents: Tokenized,
) -> Iterator[tuple[int, PlacedDocument, Pieces]]:
    """Yield the documents with any token, numbered and in their frames; refuse a whole epoch without one."""
    is_empty = position == _first_position(position.epoch)  # not the rest of an epoch
    for number, tokenized in enumerate(documents):
        if tokenized is None:
            if is_empty:
                raise _no_text(source, _num(skipped))
            is_empty = True
            continue
        placed, pieces = tokenized
        framed = vocabulary.framed(placed.document, pieces, skipped)
        if (first := next(framed, None)) is not None:
            is_empty = False
            yield number, placed, chain((first,), framed)


def _placed(pieces: Pieces, begin: Cursor, chosen: int, first: int) -> Iterator[tuple[Cursor, TokenIds]]:
    """Yield each piece's ids with their cursor: the first piece is at `begin`, the others at their own offset."""
    cursor, offset, num_tokens = begin, first, 0
    for piece_offset, ids in pieces:
        if piece_offset != offset:
            sources = list(begin.sources)
            sources[chosen] = replace(sources[chosen], offset=piece_offset)
            cursor, offset, num_tokens = replace(begin, sources=tuple(sources)), piece_offset, 0
        yield cursor.later(num_tokens), ids
        num_tokens += len(ids)


def _skip(
    runs: Iterator[tuple[Cursor, TokenIds]], num_tokens: int, source: DocumentSource
) -> Iterator[tuple[Cursor, TokenIds]]:
    for cursor, ids in runs:
        if num_tokens < len(ids):
            yield cursor.later(num_tokens), ids[num_tokens:]
        num_tokens = max(0, num_tokens - len(ids))
    if num_tokens:
        raise _nothing_at(source)


def _nothing_at(source: DocumentSource) -> InputError:
    problem = "has less data than the checkpoint has consumed"
    hint = "start this data from its first sequence with --restart-data and another --seed"
    return DataError(source.name, problem, hint, code="data.shorter")


def _no_text(source: DocumentSource, num_skipped: int) -> InputError:
    hint = f"all its {num_skipped} documents were skipped" if num_skipped else "its files are empty: choose others"
    return DataError(source.name, "contains no text", hint, code="data.empty")


def _num(skipped: Skipped | None) -> int:
    return 0 if skipped is None else skipped.count


def _first_position(epoch: int) -> SourcePosition:
    return SourcePosition(epoch=epoch, item=0, offset=0)
