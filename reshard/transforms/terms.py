"""What an adapter adds to a weight when it is read."""

from __future__ import annotations

from dataclasses import dataclass

from stores.bundles import TensorAt


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """What an adapter adds to a matrix, or to each of a stack of them: `scale` x B A, or its transpose.

    Of experts, `expert` of `num_experts` is taken, or the one that a matrix of the stack is of; of B the rows from
    `first` on.
    """

    a: TensorAt
    b: TensorAt
    rank: int
    scale: float = 1.0
    num_experts: int = 1
    expert: int | None = None
    first: int = 0
    is_transposed: bool = False
