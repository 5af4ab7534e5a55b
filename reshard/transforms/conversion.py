"""What pack changes of the tensors on their way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from manifests.errors import UsageError
from reshard.tensors.checkpoint import Checkpoint
from reshard.transforms.cast import STORED, Dtype, cast_checkpoint

__all__ = ["Conversion", "convert"]

Plain = Literal["bf16", "fp32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What `pack` changes of the tensors: `dtype` casts weights, `dequantise` makes quantized ones plain.

    With `merge_slices`, tensors that ranks wrote in slices become whole.
    """

    dtype: Dtype | None = None
    dequantise: Plain | None = None
    merge_slices: bool = False

    @property
    def changes_bytes(self) -> bool:
        return self.dtype is not None or self.dequantise is not None


def convert(checkpoint: Checkpoint, asked: Conversion) -> Checkpoint:
    """Give a checkpoint whose tensors are converted when they are read.

    Raises:
        InputError, UsageError: see `dequantise` and `cast_checkpoint`.
        UsageError: weights that belong to moments were to be cast.
    """
    if asked.dequantise is not None:
        from reshard.transforms.dequantize import dequantise

        checkpoint = dequantise(checkpoint, STORED[asked.dequantise])
    if asked.dtype is not None:
        if checkpoint.moments:
            problem = "SOURCE has an optimizer's moments, and training goes on with the weights as it left them"
            raise UsageError(
                "--dtype",
                problem,
                "leave it out here; reshard export --dtype casts",
                code="options.dtype-with-optimizer-state",
            )
        checkpoint = cast_checkpoint(checkpoint, asked.dtype)
    return replace(checkpoint, merges_slices=asked.merge_slices)
