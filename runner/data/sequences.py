"""Documents to sequences of tokens, numbered from 0 and without end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from itertools import chain, count, islice, repeat
from pathlib import Path

import torch

from manifests.errors import InputError
from manifests.schema import DataCursor
from runner.data.batches import IGNORED, Batch, Sample, batch_samples
from runner.data.documents import open_sources
from runner.data.mixture import Drawn, draw_documents, first_cursor
from runner.data.vocabulary import load_vocabulary
from runner.recipe import SYNTHETIC, BatchOptions, DataOptions

__all__ = ["read_batches", "read_once"]


def read_batches(
    data: DataOptions,
    batch: BatchOptions,
    *,
    folder: Path,
    vocab_size: int,
    start: int = 0,
    cursor: DataCursor | None = None,
) -> Iterator[Batch]:
    """Give batches without end; the first begins with sequence number `start`, which lies at the cursor.

    The same options always give the same sequences. Each batch says at which cursor the next one begins;
    without a cursor, whatever lies before `start` is read. The tokenizer is the one in `folder`;
    `synthetic` needs neither.

    Raises:
        InputError: see `runner.data.files`, `runner.data.mixture` and `runner.data.vocabulary`, some of it only once
            batches are drawn.
    """
    if data.sources == (SYNTHETIC,):
        return batch_samples(_synthetic(data.seed, vocab_size, batch.seq_len, start), batch.global_batch)
    vocabulary, sources = load_vocabulary(folder, vocab_size), open_sources(data)
    begin = cursor or first_cursor(len(sources))
    documents = draw_documents(data, sources, vocabulary, begin, is_endless=True)
    samples = _samples(documents, data, batch.seq_len, vocabulary.eos)
    return batch_samples(samples if cursor else islice(samples, start, None), batch.global_batch)


def read_once(data: DataOptions, batch: BatchOptions, *, folder: Path, vocab_size: int) -> Iterator[Batch]:
    """Give the batches of one pass over the data, every token once; the last is filled with what does not count.

    Raises:
        InputError: as `read_batches`; or for `synthetic`, which has no end.
    """
    if data.sources == (SYNTHETIC,):
        raise InputError(SYNTHETIC, "has no end, so it cannot be read once", "name files")
    vocabulary, sources = load_vocabulary(folder, vocab_size), open_sources(data)
    documents = draw_documents(data, sources, vocabulary, first_cursor(len(sources)), is_endless=False)
    nothing = _filled_up([], batch.seq_len, vocabulary.eos)
    samples = _samples(documents, data, batch.seq_len, vocabulary.eos)
    while group := tuple(islice(samples, batch.global_batch)):
        yield from batch_samples(islice(chain(group, repeat(nothing)), batch.global_batch), batch.global_batch)


def _samples(documents: Iterable[Drawn], data: DataOptions, seq_len: int, filler: int) -> Iterator[Sample]:
    return _packed(documents, seq_len, filler) if data.pack else _padded(documents, seq_len, filler)


def _packed(documents: Iterable[Drawn], seq_len: int, filler: int) -> Iterator[Sample]:
    """Cut documents laid end to end: a sequence begins with the token that ended the one before."""
    ids: list[int] = []
    runs: deque[tuple[int, DataCursor]] = deque()  # what ids are made of: where each begins, from the first of all
    num_cut = 0
    for run, more in chain.from_iterable(document.runs for document in documents):
        runs.append((num_cut + len(ids), run))
        ids += more
        num_used = (len(ids) - 1) // seq_len * seq_len
        for begin in range(0, num_used, seq_len):
            cursor = _cursor_at(num_cut + begin + seq_len, runs)
            yield _filled_up(ids[begin : begin + seq_len + 1], seq_len, filler, cursor)
        del ids[:num_used]
        num_cut += num_used
    if len(ids) > 1:
        yield _filled_up(ids, seq_len, filler)


def _cursor_at(place: int, runs: deque[tuple[int, DataCursor]]) -> DataCursor:
    """Give the cursor of a token, and forget the runs before its own."""
    while len(runs) > 1 and runs[1][0] <= place:
        runs.popleft()
    begin, cursor = runs[0]
    return replace(cursor, num_tokens=cursor.num_tokens + place - begin)


def _padded(documents: Iterable[Drawn], seq_len: int, filler: int) -> Iterator[Sample]:
    """Make each document one sequence: what is too long is cut off, what is too short filled up."""
    for document in documents:
        ids = chain.from_iterable(ids for _, ids in document.runs)
        yield _filled_up(list(islice(ids, seq_len + 1)), seq_len, filler, document.after)


def _filled_up(ids: list[int], seq_len: int, filler: int, cursor: DataCursor | None = None) -> Sample:
    """Give at most seq_len + 1 ids as tokens and labels; what they lack is filled, and does not count."""
    tokens, labels = torch.full((seq_len,), filler), torch.full((seq_len,), IGNORED)
    num_labels = max(0, len(ids) - 1)
    tokens[:num_labels], labels[:num_labels] = torch.tensor(ids[:num_labels]), torch.tensor(ids[1:])
    return Sample(tokens=tokens, labels=labels, cursor=cursor)


def _synthetic(seed: int, vocab_size: int, seq_len: int, start: int) -> Iterator[Sample]:
    for number in count(start):
        # A generator takes up 32 bits of its seed: stir both numbers into them.
        stirred = blake2b(f"{seed} {number}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(stirred, "little"))
        window = torch.randint(vocab_size, (seq_len + 1,), generator=generator)
        yield Sample(tokens=window[:-1], labels=window[1:], cursor=None)
