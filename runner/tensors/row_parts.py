"""The ranks that share each row with context parallelism, and which of its tokens each has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist


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


def places_of(rank: int, size: int, length: int) -> torch.Tensor:
    """Return the places in a row that a rank has: two of 2 x `size` chunks, in zig-zag.

    Rank r has chunk r from the beginning and chunk r from the end: a causal mask leaves all ranks the same work.
    """
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
