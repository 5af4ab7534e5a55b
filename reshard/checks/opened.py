"""Checks a checkpoint by opening it: whether what it has, named and cut in another way, is all of its model."""

from __future__ import annotations

from reshard.checks.finding import Contents
from reshard.tensors.checkpoint import Checkpoint

__all__ = ["contents_of"]


def contents_of(checkpoint: Checkpoint) -> Contents:
    """Return what a checkpoint has."""
    assert checkpoint.originals is not None, "every source has them"
    tensors = [tensor for kind in (checkpoint.tensors, *checkpoint.moments.values()) for tensor in kind.values()]
    return Contents(
        num_tensors=len(tensors),
        num_files=len(checkpoint.originals.files),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        tensors=checkpoint.tensors,
    )
