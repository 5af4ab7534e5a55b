"""Which document comes next, of whichever source, and where in the sources each of its tokens is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from manifests.errors import DataError, InputError
from manifests.schema import DataCursor, SourcePosition
from runner.config.schema import DataOptions
from runner.data.bad import Skipped
from runner.data.documents import Found, Source
from runner.data.shuffle import draw
from runner.data.tokenizer import Vocabulary

__all__ = ["Cursor", "Drawn", "draw_documents", "first_cursor"]

_Ids = Iterator[tuple[int, list[int]]]  # of pieces, see `Vocabulary.encode`


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor(DataCursor):
    """A place in the data, and the documents that were skipped before it."""

    num_skipped: int = 0

    @property
    def plain(self) -> DataCursor:
        """The place alone, as a manifest has it."""
        return DataCursor(num_documents=self.num_documents, num_tokens=self.num_tokens, sources=self.sources)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """A document's ids, piece by piece, each with the place of its first; and, once they are taken, the place after."""

    runs: Iterator[tuple[Cursor, list[int]]]
    skipped: Skipped | None
    following: Cursor

    @property
    def after(self) -> Cursor:
        return replace(self.following, num_skipped=_num(self.skipped))


def first_cursor(num_sources: int) -> DataCursor:
    """Return the place at which the data begins."""
    return DataCursor(num_documents=0, num_tokens=0, sources=num_sources * (_first_position(0),))


def draw_documents(
    data: DataOptions, sources: Sequence[Source], vocabulary: Vocabulary, cursor: DataCursor, *, is_endless: bool,
    skipped: Skipped | None = None,
) -> Iterator[Drawn]:  # fmt: skip
    """Give the documents that hold any token from a place on: pass after pass of each source, or one pass.

    Which source is next depends on the seed and the document's number alone. A document that is no text is `skipped`,
    and has no number, if anybody counts them; its place is between those of its neighbours.

    Raises:
        InputError: see `runner.data.files`; a source without text; or nothing is at the place.
    """
    positions, left = list(cursor.sources), cursor.num_tokens
    readers = [
        _read_passes(source, position, vocabulary, skipped, is_endless=is_endless)
        for source, position in zip(sources, positions, strict=True)
    ]
    for number in count(cursor.num_documents):
        chosen = draw(data.weights, data.seed, number) if len(sources) > 1 else 0
        if (following := next(readers[chosen], None)) is None:
            return
        found, ids = following
        positions[chosen] = found.begin
        begin = Cursor(num_documents=number, num_tokens=0, sources=tuple(positions), num_skipped=_num(skipped))
        positions[chosen] = found.after
        runs = _placed(ids, begin, chosen, found.document.begin)
        yield Drawn(
            runs=_skip(runs, left, sources[chosen]) if left else runs,
            skipped=skipped,
            following=Cursor(num_documents=number + 1, num_tokens=0, sources=tuple(positions)),
        )
        left = 0


def _read_passes(
    source: Source, position: SourcePosition, vocabulary: Vocabulary, skipped: Skipped | None, *, is_endless: bool
) -> Iterator[tuple[Found, _Ids]]:
    if position.item > source.num_items:
        raise _nothing_at(source)
    while True:
        is_empty = position == _first_position(position.epoch)  # and not the rest of a pass
        for item in range(position.item, source.num_items):
            offset = position.offset if item == position.item else 0
            for found in source.read(replace(position, item=item, offset=offset)):
                ids = vocabulary.encode(found.document, skipped)
                if (first := next(ids, None)) is not None:
                    is_empty = False
                    yield found, chain((first,), ids)
        if is_empty:
            raise _no_text(source, _num(skipped))
        if not is_endless:
            return
        position = _first_position(position.epoch + 1)


def _placed(ids: _Ids, begin: Cursor, chosen: int, first: int) -> Iterator[tuple[Cursor, list[int]]]:
    """Say of each piece's ids where they are: the first piece is at `begin`, later ones further on in its source."""
    at, offset, num_tokens = begin, first, 0
    for piece_offset, piece in ids:
        if piece_offset != offset:
            sources = list(begin.sources)
            sources[chosen] = replace(sources[chosen], offset=piece_offset)
            at, offset, num_tokens = replace(begin, sources=tuple(sources)), piece_offset, 0
        yield replace(at, num_tokens=num_tokens), piece
        num_tokens += len(piece)


def _skip(
    runs: Iterator[tuple[Cursor, list[int]]], num_tokens: int, source: Source
) -> Iterator[tuple[Cursor, list[int]]]:
    for cursor, ids in runs:
        if num_tokens < len(ids):
            yield replace(cursor, num_tokens=cursor.num_tokens + num_tokens), ids[num_tokens:]
        num_tokens = max(0, num_tokens - len(ids))
    if num_tokens:
        raise _nothing_at(source)


def _nothing_at(source: Source) -> InputError:
    problem = "ends before the place at which the checkpoint left it"
    hint = "--restart-data with another --seed begins this data at its first sequence"
    return DataError(source.name, problem, hint, code="data.shorter")


def _no_text(source: Source, num_skipped: int) -> InputError:
    hint = f"{num_skipped} documents were skipped" if num_skipped else "its files are empty: name others"
    return DataError(source.name, "there is no text to learn from", hint, code="data.empty")


def _num(skipped: Skipped | None) -> int:
    return 0 if skipped is None else skipped.count


def _first_position(epoch: int) -> SourcePosition:
    return SourcePosition(epoch=epoch, item=0, offset=0)
