"""Batches: the sequences of one optimizer step as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch

from runner.data.mixture import Cursor

IGNORED = -100  # the label of positions that are ignored in the loss


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One sequence.

    Shapes: tokens and labels (L,).
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    cursor: Cursor | None  # of the next sequence; None for synthetic data, which is found by number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The sequences of one optimizer step.

    Shapes: tokens and labels (B, L), int64; labels are the next tokens, or IGNORED.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    num_tokens: int  # labels that are not IGNORED, at least 1
    cursor: Cursor | None = None  # that of the last sequence


def batch_samples(samples: Iterator[Sample], global_batch: int) -> Iterator[Batch]:
    """Yield batches of `global_batch` sequences; an incomplete last one is dropped."""
    while group := tuple(islice(samples, global_batch)):
        if len(group) < global_batch:
            return
        tokens, labels = (torch.stack([getattr(sample, part) for sample in group]) for part in ("tokens", "labels"))
        num_tokens = int((labels != IGNORED).sum())
        yield Batch(tokens=tokens, labels=labels, num_tokens=num_tokens, cursor=group[-1].cursor)


def rows_of(batch: Batch, number: int, count: int) -> Batch:
    """Return the rows of data-parallel rank `number` of `count`; `num_tokens` is still the whole batch's."""
    each = len(batch.tokens) // count
    rows = slice(number * each, (number + 1) * each)
    return replace(batch, tokens=batch.tokens[rows], labels=batch.labels[rows])
