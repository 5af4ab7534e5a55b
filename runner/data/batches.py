"""Batches: the sequences of one optimizer step as tensors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from runner.data.mixture import Cursor

IGNORED = -100  # the label of positions that are ignored in the loss


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """The token ids of one sequence: those that it begins with, and the label of the last one."""

    ids: array[int]  # at most the sequence length + 1; none in a sequence that fills up a batch
    cursor: Cursor | None = None  # of the next sequence

    @property
    def num_labels(self) -> int:
        return max(0, len(self.ids) - 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The sequences of one optimizer step, or one rank's rows of them.

    Shapes: tokens and labels (B, L), int64; labels are the next tokens, or IGNORED.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    num_tokens: int  # labels of the whole batch that are not IGNORED, at least 1
    cursor: Cursor | None = None  # that of the last sequence; None for synthetic data, which is found by number


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of data-parallel rank `number` of `count`."""

    number: int = 0
    count: int = 1

    def within(self, global_batch: int) -> slice:
        num_rows = global_batch // self.count
        return slice(self.number * num_rows, (self.number + 1) * num_rows)


WHOLE_BATCH = Rows()


def build_batch(samples: Sequence[Sample], seq_len: int, filler: int, rows: Rows = WHOLE_BATCH) -> Batch:
    """Build these rows of a batch, padded with `filler` and IGNORED."""
    own = samples[rows.within(len(samples))]
    tokens = torch.full((len(own), seq_len), filler)
    labels = torch.full((len(own), seq_len), IGNORED)
    for row, sample in enumerate(own):
        if sample.num_labels:
            ids = torch.frombuffer(sample.ids, dtype=torch.int32)
            tokens[row, : sample.num_labels], labels[row, : sample.num_labels] = ids[:-1], ids[1:]
    num_tokens = sum(sample.num_labels for sample in samples)
    return Batch(tokens=tokens, labels=labels, num_tokens=num_tokens, cursor=samples[-1].cursor)


def rows_of(batch: Batch, rows: Rows) -> Batch:
    """Return these rows of a whole batch; `num_tokens` is still the whole batch's."""
    part = rows.within(len(batch.tokens))
    return replace(batch, tokens=batch.tokens[part], labels=batch.labels[part])
