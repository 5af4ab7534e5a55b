"""Documents to token sequences, packed or padded."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from runner.config.schema import DataOptions
from runner.data.mixture import Cursor, Drawn
from runner.data.rows import IGNORED, decode_row


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """The token ids of one sequence: those that it begins with, and the label of the last one.

    A token that is not a label is the negative number ~id.
    """

    ids: array[int]  # at most the sequence length + 1; none in a sequence that fills up a batch
    cursor: Cursor | None = None  # of the next sequence
    begins: tuple[int, ...] = ()  # where documents begin in `ids`, but for the one at 0
    is_masked: bool = False  # whether documents are kept apart: none predicts the first token of the next one
    documents: tuple[int, ...] = ()  # their numbers: of the one at 0, and of those that begin in `ids`

    def __reduce__(self) -> tuple[Any, ...]:  # for another rank, which fills it into a batch, without its cursor
        return partial(type(self), ids=self.ids, begins=self.begins, is_masked=self.is_masked), ()

    @property
    def num_labels(self) -> int:
        return max(0, len(self.ids) - 1)

    @property
    def num_tokens(self) -> int:
        """How many labels count in the loss."""
        if not self.num_labels:
            return 0
        num_tokens = int((torch.frombuffer(self.ids, dtype=torch.int32)[1:] >= 0).sum())
        return num_tokens - sum(self.ids[begin] >= 0 for begin in self.begins) if self.is_masked else num_tokens

    @property
    def num_documents(self) -> int:
        """How many documents have a token in the sequence, the label of its last one aside."""
        return 1 + sum(begin < self.num_labels for begin in self.begins) if self.num_labels else 0

    def cut(self, seq_len: int) -> Sample:
        """Return it with at most so many tokens."""
        return replace(self, ids=self.ids[: seq_len + 1])

    def fill(self, row: Mapping[str, torch.Tensor]) -> None:
        """Write it into a row of a batch.

        A document that began in an earlier row begins again, and padding is part of the last one.

        Shapes: tokens, labels and positions (L,).
        """
        if self.num_labels:
            ids = torch.frombuffer(self.ids, dtype=torch.int32)
            row["tokens"][: self.num_labels] = torch.where(ids < 0, ~ids, ids)[:-1]
            row["labels"][: self.num_labels] = torch.where(ids < 0, IGNORED, ids)[1:]
        for begin in self.begins if self.is_masked else ():
            row["labels"][begin - 1] = IGNORED
            row["positions"][begin:] = torch.arange(len(row["positions"]) - begin)


class RowSample(Sample):
    """A row of token ids of its own; `ids` is the encoded row, see `runner.data.rows.Row`."""

    __slots__ = ()

    @property
    def num_labels(self) -> int:
        return self.ids[2]

    @property
    def num_tokens(self) -> int:
        return self.ids[0]

    @property
    def num_documents(self) -> int:
        return self.ids[1]

    def cut(self, seq_len: int) -> RowSample:
        return self

    def fill(self, row: Mapping[str, torch.Tensor]) -> None:
        decoded = decode_row(self.ids)
        length = len(decoded.ids)
        row["tokens"][:length], row["labels"][:length] = torch.tensor(decoded.ids), torch.tensor(decoded.labels)
        for name, values in decoded.fields.items():
            (row[name][:length] if row[name].dim() else row[name]).copy_(torch.tensor(values))
        if decoded.positions is not None:
            row["positions"][:length] = torch.tensor(decoded.positions)
            row["positions"][length:] += decoded.positions[-1] - (length - 1)  # padding is part of the last document


def pack_documents(documents: Iterable[Drawn], data: DataOptions, seq_len: int) -> Iterator[Sample]:
    if data.is_tokenized:
        return _rows(documents, is_masked=data.document_mask)
    return _packed(documents, seq_len, is_masked=data.document_mask) if data.pack else _padded(documents, seq_len)


def _packed(documents: Iterable[Drawn], seq_len: int, *, is_masked: bool) -> Iterator[Sample]:
    """Split concatenated documents: each sequence begins with the last token of the previous one."""
    ids = array("i")
    runs: deque[tuple[int, Cursor]] = deque()  # the index of each run's first id, counted over all ids, and its cursor
    firsts: deque[tuple[int, int]] = deque()  # the index of each document's first id, so counted, and its number
    num_cut = 0
    for first, run, more in _marked(documents):
        if first is not None:
            firsts.append((num_cut + len(ids), first))
        runs.append((num_cut + len(ids), run))
        ids += more
        num_used = (len(ids) - 1) // seq_len * seq_len
        for begin in range(0, num_used, seq_len):
            cursor = _cursor_at(num_cut + begin + seq_len, runs)
            begins, numbers = _begins_in(firsts, num_cut + begin, seq_len)
            part = ids[begin : begin + seq_len + 1]
            yield Sample(ids=part, cursor=cursor, begins=begins, is_masked=is_masked, documents=numbers)
        del ids[:num_used]
        num_cut += num_used
    if len(ids) > 1:
        begins, numbers = _begins_in(firsts, num_cut, seq_len)
        yield Sample(ids=ids, begins=begins, is_masked=is_masked, documents=numbers)


def _marked(documents: Iterable[Drawn]) -> Iterator[tuple[int | None, Cursor, array[int]]]:
    """Yield the runs of all documents, the first of each with the document's number."""
    for document in documents:
        number: int | None = document.number
        for run, ids in document.runs:
            yield number, run, ids
            number = None


def _begins_in(firsts: deque[tuple[int, int]], place: int, seq_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where documents begin in the sequence at a place, but for its first token, and the numbers of all of its
    documents; remove those that end before it.
    """
    while len(firsts) > 1 and firsts[1][0] <= place:
        firsts.popleft()
    _, *begun = inside = [*takewhile(lambda first: first[0] <= place + seq_len, firsts)]
    return tuple(first - place for first, _ in begun), tuple(number for _, number in inside)


def _cursor_at(place: int, runs: deque[tuple[int, Cursor]]) -> Cursor:
    """Return the cursor of a token, and remove the runs before its own."""
    while len(runs) > 1 and runs[1][0] <= place:
        runs.popleft()
    begin, cursor = runs[0]
    return cursor.later(place - begin)


def _padded(documents: Iterable[Drawn], seq_len: int) -> Iterator[Sample]:
    """Make each document one sequence, truncated where it is longer."""
    for document in documents:
        ids = array("i")
        for _, more in document.runs:
            ids += more
            if len(ids) > seq_len:
                break
        yield Sample(ids=ids[: seq_len + 1], cursor=document.after, documents=(document.number,))


def _rows(documents: Iterable[Drawn], *, is_masked: bool) -> Iterator[Sample]:
    for document in documents:
        for _, ids in document.runs:
            yield RowSample(ids=ids, cursor=document.after, is_masked=is_masked, documents=(document.number,))
