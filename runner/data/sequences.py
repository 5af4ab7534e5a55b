"""Documents to token sequences, packed or padded and numbered from 0, and to the batches of optimizer steps."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, count, islice, repeat, takewhile
from pathlib import Path

import torch

from manifests.errors import DataError
from manifests.schema import DataCursor
from runner.config.schema import SYNTHETIC, BatchOptions, DataOptions
from runner.data.bad import Skipped
from runner.data.documents import DocumentSource, open_sources
from runner.data.mixture import Cursor, Drawn, draw_documents, first_cursor
from runner.data.rows import IGNORED, RowForm, decode_row
from runner.data.tokenizer import Tokenize, TokenRows, Vocabulary, load_vocabulary, tokenize_alone
from runner.tensors.row_parts import places_of

_MOST_WAITING = 64  # lengths with incomplete batches


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """The token ids of one sequence: those that it begins with, and the label of the last one.

    A token that is not a label is the negative number ~id.
    """

    ids: array[int]  # at most the sequence length + 1; none in a sequence that fills up a batch
    cursor: Cursor | None = None  # of the next sequence
    begins: tuple[int, ...] = ()  # where documents begin in `ids`, but for the one at 0
    is_masked: bool = False  # whether documents are kept apart: none predicts the first token of the next one
    is_packed: bool = False  # whether its first document may have begun in an earlier sequence
    document: int = 0  # the number of its first label's, in one epoch

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The sequences of one optimizer step, or one rank's rows of them.

    Shapes: tokens, labels and positions (B, L), int64; labels are the next tokens, or IGNORED.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    num_tokens: int  # labels of the whole batch that are not IGNORED, at least 1
    cursor: Cursor | None = None  # that of the last sequence; None for synthetic data, which is found by number
    positions: torch.Tensor | None = None  # of tokens in their document, 0 where one begins; None: rows are one text
    num_documents: int | None = None  # in the rows of the whole batch; None: the data has no documents
    state: str | None = None  # of a package's own dataset after it, as JSON
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what the loss reads: (B, L) or (B,), float32
    samples: tuple[Sample, ...] = ()  # of one epoch: the sequences of the whole batch, without those that fill it up

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its tensors: each has a row for each sequence."""
        positions = () if self.positions is None else (self.positions,)
        return (self.tokens, self.labels, *positions, *self.fields.values())

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with each of its tensors changed."""
        return replace(
            self,
            tokens=change(self.tokens),
            labels=change(self.labels),
            positions=None if self.positions is None else change(self.positions),
            fields={name: change(tensor) for name, tensor in self.fields.items()},
        )

    def rows(self, begin: int, count: int) -> Batch:
        """Return some rows of it; `num_tokens` is still the whole batch's."""
        return self.map(lambda tensor: tensor[begin : begin + count])

    def part(self, number: int, count: int) -> Batch:
        """Return a context-parallel rank's tokens and labels of each row; positions are still those of whole rows."""
        if count == 1:
            return self
        places = places_of(number, count, self.tokens.shape[1])
        fields = {name: tensor[:, places] if tensor.dim() > 1 else tensor for name, tensor in self.fields.items()}
        return replace(self, tokens=self.tokens[:, places], labels=self.labels[:, places], fields=fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of data-parallel rank `number` of `count`."""

    number: int = 0
    count: int = 1

    def within(self, global_batch: int) -> slice:
        num_rows = global_batch // self.count
        return slice(self.number * num_rows, (self.number + 1) * num_rows)


WHOLE_BATCH = Rows()


def read_batches(
    data: DataOptions,
    batch: BatchOptions,
    *,
    folder: Path,
    vocab_size: int,
    start: int = 0,
    cursor: DataCursor | None = None,
    skipped: Skipped | None = None,
    rows: Rows = WHOLE_BATCH,
    tokenize: Tokenize = tokenize_alone,
    form: RowForm | None = None,
) -> Iterator[Batch]:
    """Yield these rows of batches without end; the first begins with sequence number `start`, which is at the cursor.

    The same options always yield the same sequences. Each batch has the cursor of the next one; without a cursor,
    everything before `start` is read. The tokenizer is in `folder`; `synthetic` needs neither. `skipped` counts invalid
    documents, starting from those before the cursor; a batch's cursor has the count up to it. `form` has the fields of
    rows that the loss reads.
    """
    if data.sources == (SYNTHETIC,):
        return _synthetic(data.seed, vocab_size, batch, start, rows)
    vocabulary, sources = _open(data, batch, folder, vocab_size, form)
    documents = draw_documents(
        data, sources, vocabulary, cursor or first_cursor(len(sources)),
        is_endless=True, skipped=_counted(data, skipped), tokenize=tokenize,
    )  # fmt: skip
    samples = islice(_samples(documents, data, batch.seq_len), 0 if cursor else start, None)
    groups = iter(lambda: tuple(islice(samples, batch.global_batch)), ())
    return (build_batch(group, batch.seq_len, vocabulary.filler, rows, form) for group in groups)


def read_once(
    data: DataOptions,
    batch: BatchOptions,
    *,
    folder: Path,
    vocab_size: int,
    padded_length: Callable[[int, int], int] = max,
    skipped: Skipped | None = None,
    form: RowForm | None = None,
) -> Iterator[Batch]:
    """Yield the batches of one epoch, with every token once; the last batches are padded with ignored labels.

    `padded_length` maps a row's own length and `--seq-len` to its padded length, see `runner.models.Family`; all rows
    of a batch have the same length. At the end, `skipped` has the number of skipped documents.
    """
    if data.sources == (SYNTHETIC,):
        raise DataError(
            SYNTHETIC, "has no end, so evaluation cannot use it", "use files, folders or globs", code="data.synthetic"
        )
    vocabulary, sources = _open(data, batch, folder, vocab_size, form)
    begin = first_cursor(len(sources))
    documents = draw_documents(data, sources, vocabulary, begin, is_endless=False, skipped=_counted(data, skipped))
    samples, empty = _numbered(_samples(documents, data, batch.seq_len)), Sample(ids=array("i"))
    for seq_len, group in _of_one_length(samples, batch, padded_length, keeps_all=form is not None):
        filled = tuple(islice(chain(group, repeat(empty)), batch.global_batch))
        yield replace(build_batch(filled, seq_len, vocabulary.filler, form=form), samples=tuple(group))


def build_batch(
    samples: Sequence[Sample], seq_len: int, filler: int, rows: Rows = WHOLE_BATCH, form: RowForm | None = None
) -> Batch:
    """Build these rows of a batch, padded with `filler` and IGNORED."""
    rank_samples, is_masked = samples[rows.within(len(samples))], samples[0].is_masked
    tensors = {
        "tokens": torch.full((len(rank_samples), seq_len), filler),
        "labels": torch.full((len(rank_samples), seq_len), IGNORED),
    }
    if is_masked:
        tensors["positions"] = torch.arange(seq_len).repeat(len(rank_samples), 1)
    fields = {name: torch.zeros((len(rank_samples), seq_len)) for name in (form.per_token if form else ())}
    fields |= {name: torch.zeros(len(rank_samples)) for name in (form.per_row if form else ())}
    for row, sample in enumerate(rank_samples):
        sample.fill({name: tensor[row] for name, tensor in (tensors | fields).items()})
    return Batch(
        num_tokens=max(1, sum(sample.num_tokens for sample in samples)),
        cursor=samples[-1].cursor,
        num_documents=sum(sample.num_documents for sample in samples),
        fields=fields,
        positions=tensors.get("positions"),
        tokens=tensors["tokens"],
        labels=tensors["labels"],
    )


def rows_of(batch: Batch, rows: Rows) -> Batch:
    """Return these rows of a whole batch; `num_tokens` is still the whole batch's."""
    part = rows.within(len(batch.tokens))
    return batch.rows(part.start, part.stop - part.start)


def _numbered(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Number the documents of sequences, which begin in a packed one, or are one each."""
    number = 0
    for sample in samples:
        yield replace(sample, document=number)
        number += len(sample.begins) if sample.is_packed else 1


def _of_one_length(
    samples: Iterable[Sample], batch: BatchOptions, padded_length: Callable[[int, int], int], *, keeps_all: bool
) -> Iterator[tuple[int, list[Sample]]]:
    """Yield groups of samples of one length, at most a batch; samples without labels may be dropped."""
    waiting: dict[int, list[Sample]] = {}
    for sample in samples:
        if not sample.num_tokens and not keeps_all:
            continue
        seq_len = padded_length(sample.num_labels, batch.seq_len)
        group = waiting.setdefault(seq_len, [])
        group.append(sample.cut(seq_len))
        if len(group) == batch.global_batch or len(waiting) > _MOST_WAITING:
            full = seq_len if len(group) == batch.global_batch else next(iter(waiting))
            yield full, waiting.pop(full)
    yield from waiting.items()


def _open(
    data: DataOptions, batch: BatchOptions, folder: Path, vocab_size: int, form: RowForm | None
) -> tuple[Vocabulary | TokenRows, tuple[DocumentSource, ...]]:
    if data.is_tokenized:
        row = form or RowForm()
        row = replace(row, seq_len=batch.seq_len, vocab_size=vocab_size, is_masked=data.document_mask)
        return TokenRows(), open_sources(data, row)
    has_prompts = data.completion_field is not None
    return load_vocabulary(folder, vocab_size, data.framing, has_prompts=has_prompts), open_sources(data)


def _counted(data: DataOptions, skipped: Skipped | None) -> Skipped | None:
    """Return the counter of invalid documents; None: they are errors."""
    return (skipped or Skipped()) if data.skip_bad_documents else None


def _samples(documents: Iterable[Drawn], data: DataOptions, seq_len: int) -> Iterator[Sample]:
    if data.is_tokenized:
        return _rows(documents, is_masked=data.document_mask)
    return _packed(documents, seq_len, is_masked=data.document_mask) if data.pack else _padded(documents, seq_len)


def _packed(documents: Iterable[Drawn], seq_len: int, *, is_masked: bool) -> Iterator[Sample]:
    """Split concatenated documents: each sequence begins with the last token of the previous one."""
    ids = array("i")
    runs: deque[tuple[int, Cursor]] = deque()  # the index of each run's first id, counted over all ids, and its cursor
    firsts: deque[int] = deque()  # the index of each document's first id, counted over all ids
    num_cut = 0
    for is_first, run, more in _marked(documents):
        if is_first:
            firsts.append(num_cut + len(ids))
        runs.append((num_cut + len(ids), run))
        ids += more
        num_used = (len(ids) - 1) // seq_len * seq_len
        for begin in range(0, num_used, seq_len):
            cursor = _cursor_at(num_cut + begin + seq_len, runs)
            begins = _begins_in(firsts, num_cut + begin, seq_len)
            yield Sample(
                ids=ids[begin : begin + seq_len + 1], cursor=cursor, begins=begins, is_masked=is_masked, is_packed=True
            )
        del ids[:num_used]
        num_cut += num_used
    if len(ids) > 1:
        yield Sample(ids=ids, begins=_begins_in(firsts, num_cut, seq_len), is_masked=is_masked, is_packed=True)


def _marked(documents: Iterable[Drawn]) -> Iterator[tuple[bool, Cursor, array[int]]]:
    """Yield the runs of all documents, each with whether it is its document's first."""
    for document in documents:
        for number, (run, ids) in enumerate(document.runs):
            yield number == 0, run, ids


def _begins_in(firsts: deque[int], place: int, seq_len: int) -> tuple[int, ...]:
    """Return where documents begin in the sequence at a place, but for its first token; remove those before it."""
    while firsts and firsts[0] <= place:
        firsts.popleft()
    return tuple(first - place for first in takewhile(lambda first: first <= place + seq_len, firsts))


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
        yield Sample(ids=ids[: seq_len + 1], cursor=document.after)


def _rows(documents: Iterable[Drawn], *, is_masked: bool) -> Iterator[Sample]:
    for document in documents:
        for _, ids in document.runs:
            yield RowSample(ids=ids, cursor=document.after, is_masked=is_masked)


def _synthetic(seed: int, vocab_size: int, batch: BatchOptions, start: int, rows: Rows) -> Iterator[Batch]:
    for first in count(start, batch.global_batch):
        windows = []
        for number in range(first, first + batch.global_batch)[rows.within(batch.global_batch)]:
            # A generator uses only 32 bits of its seed: hash both numbers into them.
            stirred = blake2b(f"{seed} {number}".encode(), digest_size=4).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(stirred, "little"))
            windows.append(torch.randint(vocab_size, (batch.seq_len + 1,), generator=generator))
        tokens, labels = (torch.stack([window[part] for window in windows]) for part in (slice(-1), slice(1, None)))
        yield Batch(tokens=tokens, labels=labels, num_tokens=batch.global_batch * batch.seq_len)
