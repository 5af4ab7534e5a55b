"""Parts of Hugging Face tensors as they lie in this rank's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Piece"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """A box of a Hugging Face tensor: what writes `memory` writes that part of a parameter or of a moment.

    Shapes: `memory` is the box, of as many dimensions as `shape`; `offset` is where it begins.
    """

    fqn: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    memory: torch.Tensor  # a view, in any strides
