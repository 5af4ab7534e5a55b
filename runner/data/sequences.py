"""Documents to the batches of optimizer steps: token sequences, numbered from 0."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, count, islice, repeat, starmap
from pathlib import Path

import torch

from manifests.schema import DataCursor
from runner.config.schema import SYNTHETIC, BatchOptions, DataOptions
from runner.data.documents import DocumentSource, open_sources
from runner.data.mixture import Cursor, draw_documents, first_cursor
from runner.data.packing import Sample, pack_documents
from runner.data.rows import IGNORED, RowForm, Skipped
from runner.data.shared import SharedReading
from runner.data.tokenizer import TokenRows, Vocabulary, load_vocabulary, tokenize_alone
from runner.tensors.row_parts import places_of

_MOST_WAITING = 64  # lengths with incomplete batches


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
    shared: SharedReading | None = None,
    form: RowForm | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Iterator[Batch]:
    """Yield these rows of batches without end; the first begins with sequence number `start`, which is at the cursor.

    The same options always yield the same sequences. Each batch has the cursor of the next one; without a cursor,
    everything before `start` is read. The tokenizer is in `folder`; `synthetic` needs neither. `skipped` counts invalid
    documents, starting from those before the cursor; a batch's cursor has the count up to it. `form` has the fields of
    rows that the loss reads. With `shared`, ranks read together, and only the first one counts and reports. `beat` is
    called while files are opened, before this returns.
    """
    if data.sources == (SYNTHETIC,):
        return _synthetic(data.seed, vocab_size, batch, start, rows)
    vocabulary = _vocabulary(data, folder, vocab_size)
    if shared is not None and not shared.is_first:
        selections = shared.follow(vocabulary, rows)
    else:
        sources = _sources(data, batch, vocab_size, form, beat)
        documents = draw_documents(
            data, sources, vocabulary, cursor or first_cursor(len(sources)),
            is_endless=True, skipped=_counted(data, skipped), tokenize=shared or tokenize_alone,
        )  # fmt: skip
        samples = islice(pack_documents(documents, data, batch.seq_len), 0 if cursor else start, None)
        groups = iter(lambda: tuple(islice(samples, batch.global_batch)), ())
        selections = shared.lead(groups, _select, rows) if shared else (_select(group, (rows,))[0] for group in groups)
    return (_fill(selected, batch.seq_len, vocabulary.filler, form) for selected in selections)


def read_once(
    data: DataOptions,
    batch: BatchOptions,
    *,
    folder: Path,
    vocab_size: int,
    padded_length: Callable[[int, int], int] = max,
    skipped: Skipped | None = None,
    form: RowForm | None = None,
    keeps_unlabeled: bool = False,
) -> Iterator[Batch]:
    """Yield the batches of one epoch, with every token once; the last batches are padded with ignored labels.

    `padded_length` maps a row's own length and `--seq-len` to its padded length, see `runner.models.Family`; all rows
    of a batch have the same length. Rows without a label that counts are left out, unless a loss takes rows of a `form`
    or `keeps_unlabeled` asks for them. At the end, `skipped` has the number of skipped documents.
    """
    vocabulary, sources = _vocabulary(data, folder, vocab_size), _sources(data, batch, vocab_size, form)
    begin = first_cursor(len(sources))
    documents = draw_documents(data, sources, vocabulary, begin, is_endless=False, skipped=_counted(data, skipped))
    samples, empty = pack_documents(documents, data, batch.seq_len), Sample(ids=array("i"))

    def build(seq_len: int, group: Sequence[Sample]) -> Batch:
        filled = tuple(islice(chain(group, repeat(empty)), batch.global_batch))
        return replace(build_batch(filled, seq_len, vocabulary.filler, form=form), samples=tuple(group))

    keeps_all = keeps_unlabeled or form is not None
    return starmap(build, _of_one_length(samples, batch, padded_length, keeps_all=keeps_all))


def build_batch(samples: Sequence[Sample], seq_len: int, filler: int, form: RowForm | None = None) -> Batch:
    """Build a batch, padded with `filler` and IGNORED."""
    (selected,) = _select(samples, (WHOLE_BATCH,))
    return _fill(selected, seq_len, filler, form)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Selection:
    """Some sequences of a batch, and what it says of the whole; see `Batch`."""

    samples: Sequence[Sample]
    num_tokens: int
    num_documents: int
    cursor: Cursor | None


def _select(samples: Sequence[Sample], parts: Sequence[Rows]) -> list[_Selection]:
    """Return each part of a batch."""
    whole = _Selection(
        samples=samples,
        num_tokens=max(1, sum(sample.num_tokens for sample in samples)),
        num_documents=sum(sample.num_documents for sample in samples),
        cursor=samples[-1].cursor,
    )
    return [replace(whole, samples=samples[rows.within(len(samples))]) for rows in parts]


def _fill(selected: _Selection, seq_len: int, filler: int, form: RowForm | None) -> Batch:
    samples = selected.samples
    tensors = {
        "tokens": torch.full((len(samples), seq_len), filler),
        "labels": torch.full((len(samples), seq_len), IGNORED),
    }
    if samples[0].is_masked:
        tensors["positions"] = torch.arange(seq_len).repeat(len(samples), 1)
    fields = {name: torch.zeros((len(samples), seq_len)) for name in (form.per_token if form else ())}
    fields |= {name: torch.zeros(len(samples)) for name in (form.per_row if form else ())}
    for row, sample in enumerate(samples):
        sample.fill({name: tensor[row] for name, tensor in (tensors | fields).items()})
    return Batch(
        num_tokens=selected.num_tokens,
        cursor=selected.cursor,
        num_documents=selected.num_documents,
        fields=fields,
        positions=tensors.get("positions"),
        tokens=tensors["tokens"],
        labels=tensors["labels"],
    )


def rows_of(batch: Batch, rows: Rows) -> Batch:
    """Return these rows of a whole batch; `num_tokens` is still the whole batch's."""
    part = rows.within(len(batch.tokens))
    return batch.rows(part.start, part.stop - part.start)


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


def _vocabulary(data: DataOptions, folder: Path, vocab_size: int) -> Vocabulary | TokenRows:
    if data.is_tokenized:
        return TokenRows()
    return load_vocabulary(folder, vocab_size, data.framing, has_prompts=data.completion_field is not None)


def _sources(
    data: DataOptions,
    batch: BatchOptions,
    vocab_size: int,
    form: RowForm | None,
    beat: Callable[[], None] = lambda: None,
) -> tuple[DocumentSource, ...]:
    row = replace(form or RowForm(), seq_len=batch.seq_len, vocab_size=vocab_size)
    return open_sources(data, row if data.is_tokenized else None, beat)


def _counted(data: DataOptions, skipped: Skipped | None) -> Skipped | None:
    """Return the counter of invalid documents; None: they are errors."""
    return (skipped or Skipped()) if data.skip_bad_documents else None


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
