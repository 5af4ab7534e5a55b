"""The ranks that share each row with context parallelism, and which of its tokens each has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParts:
    """This rank's place among the ranks that share rows, and how their attention meets."""

    rank: int
    size: int
    gathers: bool  # keys and values; otherwise ranks exchange parts of rows for heads
    group: dist.ProcessGroup | None = None

    def places(self, length: int) -> torch.Tensor:
        """Return the places in a row of `length` tokens that this rank has."""
        return places_of(self.rank, self.size, length)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole rows of which ranks have parts, without gradients. Shapes: (B, L / size), (B, L)."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        rows = part.new_empty(part.shape[0], part.shape[1] * self.size)
        for rank, tensor in enumerate(parts):
            rows[:, places_of(rank, self.size, rows.shape[1])] = tensor
        return rows


def shift_left(tensor: torch.Tensor, number: int, parts: RowParts | None, filler: int = 0) -> torch.Tensor:
    """Return rows shifted left by `number` tokens, with a filler at their ends. Shapes: (B, L), of these parts."""
    whole = tensor if parts is None else parts.gather(tensor)
    later = nn.functional.pad(whole[:, number:], (0, number), value=filler)
    return later if parts is None else later[:, parts.places(whole.shape[1])]


def places_of(rank: int, size: int, length: int) -> torch.Tensor:
    """Return the places in a row that a rank has: two of 2 x `size` chunks, in zig-zag.

    Rank r has chunk r from the beginning and chunk r from the end: a causal mask leaves all ranks the same work.
    """
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
