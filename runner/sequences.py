"""Documents to sequences of tokens, numbered from 0 and without end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain, count, islice, repeat
from pathlib import Path

import torch

from manifests.errors import InputError
from runner.batches import IGNORED, Batch, Sample, batch_samples
from runner.data import find_files, read_documents
from runner.recipe import SYNTHETIC, BatchOptions, DataOptions
from runner.vocabulary import Vocabulary, load_vocabulary

__all__ = ["read_batches", "read_once"]


def read_batches(
    data: DataOptions, batch: BatchOptions, *, folder: Path, vocab_size: int, start: int = 0
) -> Iterator[Batch]:
    """Give batches without end; the first begins with sequence number `start`.

    The same options always give the same sequences: files are read in order, over and over. The
    tokenizer is the one in `folder`; `synthetic` needs none. Reaching `start` reads what lies before.

    Raises:
        InputError: see `runner.data` and `runner.vocabulary`, some of it only once batches are
            drawn; or the sources hold no text.
    """
    if data.sources == (SYNTHETIC,):
        return batch_samples(_synthetic(data.seed, vocab_size, batch.seq_len, start), batch.global_batch)
    vocabulary = load_vocabulary(folder, vocab_size)
    documents = _epochs(find_files(data.sources), data, vocabulary)
    samples = _samples(documents, data, batch.seq_len, vocabulary.eos)
    return batch_samples(islice(samples, start, None), batch.global_batch)


def read_once(data: DataOptions, batch: BatchOptions, *, folder: Path, vocab_size: int) -> Iterator[Batch]:
    """Give the batches of one pass over the data, every token once; the last is filled with what does not count.

    Raises:
        InputError: as `read_batches`; or for `synthetic`, which has no end.
    """
    if data.sources == (SYNTHETIC,):
        raise InputError(SYNTHETIC, "has no end, so it cannot be read once", "name files")
    vocabulary = load_vocabulary(folder, vocab_size)
    documents = _epoch(find_files(data.sources), data, vocabulary)
    nothing = _filled_up([], batch.seq_len, vocabulary.eos)
    samples = _samples(documents, data, batch.seq_len, vocabulary.eos)
    while group := tuple(islice(samples, batch.global_batch)):
        yield from batch_samples(islice(chain(group, repeat(nothing)), batch.global_batch), batch.global_batch)


def _epochs(files: Sequence[Path], data: DataOptions, vocabulary: Vocabulary) -> Iterator[Iterator[list[int]]]:
    while True:
        yield from _epoch(files, data, vocabulary)


def _epoch(files: Sequence[Path], data: DataOptions, vocabulary: Vocabulary) -> Iterator[Iterator[list[int]]]:
    """Give the ids of every document that has any, piece by piece."""
    is_empty = True
    for document in read_documents(files, data.text_field):
        ids = vocabulary.encode(document)
        first = next(ids, None)
        if first is not None:
            is_empty = False
            yield chain((first,), ids)
    if is_empty:
        raise InputError(", ".join(data.sources), "there is no text to learn from")


def _samples(
    documents: Iterable[Iterator[list[int]]], data: DataOptions, seq_len: int, filler: int
) -> Iterator[Sample]:
    if data.pack:
        return _packed(chain.from_iterable(documents), seq_len, filler)
    return _padded(documents, seq_len, filler)


def _packed(pieces: Iterable[list[int]], seq_len: int, filler: int) -> Iterator[Sample]:
    """Cut documents laid end to end: a sequence begins with the token that ended the one before."""
    ids: list[int] = []
    for piece in pieces:
        ids += piece
        num_used = (len(ids) - 1) // seq_len * seq_len
        for begin in range(0, num_used, seq_len):
            yield _filled_up(ids[begin : begin + seq_len + 1], seq_len, filler)
        del ids[:num_used]
    if len(ids) > 1:
        yield _filled_up(ids, seq_len, filler)


def _padded(documents: Iterable[Iterator[list[int]]], seq_len: int, filler: int) -> Iterator[Sample]:
    """Make each document one sequence: what is too long is cut off, what is too short filled up."""
    for document in documents:
        yield _filled_up(list(islice(chain.from_iterable(document), seq_len + 1)), seq_len, filler)


def _filled_up(ids: list[int], seq_len: int, filler: int) -> Sample:
    """Give at most seq_len + 1 ids as tokens and labels; what they lack is filled, and does not count."""
    tokens, labels = torch.full((seq_len,), filler), torch.full((seq_len,), IGNORED)
    num_labels = max(0, len(ids) - 1)
    tokens[:num_labels], labels[:num_labels] = torch.tensor(ids[:num_labels]), torch.tensor(ids[1:])
    return tokens, labels


def _synthetic(seed: int, vocab_size: int, seq_len: int, start: int) -> Iterator[Sample]:
    for number in count(start):
        # A generator takes up 32 bits of its seed: stir both numbers into them.
        stirred = blake2b(f"{seed} {number}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(stirred, "little"))
        window = torch.randint(vocab_size, (seq_len + 1,), generator=generator)
        yield window[:-1], window[1:]
