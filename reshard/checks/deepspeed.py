"""Checks a DeepSpeed checkpoint: whether its layers or parameters are all of the model that config.json describes."""

from __future__ import annotations

from reshard.checks.finding import Contents
from reshard.sources.deepspeed import open_deepspeed
from stores.base import Folder

__all__ = ["check_deepspeed"]


def check_deepspeed(folder: Folder) -> Contents:
    """Return what a DeepSpeed checkpoint has.

    Raises:
        SourceError, ModelError: as `open_deepspeed`.
    """
    checkpoint = open_deepspeed(folder)
    assert checkpoint.originals is not None, "every source has them"
    tensors = [tensor for kind in (checkpoint.tensors, *checkpoint.moments.values()) for tensor in kind.values()]
    return Contents(
        num_tensors=len(tensors),
        num_files=len(checkpoint.originals.files),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        tensors=checkpoint.tensors,
    )
