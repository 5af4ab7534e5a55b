"""How `pack` converts tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from manifests.errors import Parameter, UsageError, check_choice
from reshard.tensors.checkpoint import Checkpoint
from reshard.transforms.cast import STORED, ExportDtype, cast_checkpoint

Plain = Literal["bf16", "fp32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """How `pack` converts tensors: `dtype` casts weights, `dequantize` dequantizes them.

    `merge_slices` merges tensors that several ranks stored in slices.
    """

    dtype: ExportDtype | None = None
    dequantize: Plain | None = None
    merge_slices: bool = False

    def check(self) -> None:
        """Raise UsageError for a dtype that does not exist."""
        if self.dtype is not None:
            check_choice(Parameter("conversion.dtype"), self.dtype, get_args(ExportDtype))
        if self.dequantize is not None:
            check_choice(Parameter("conversion.dequantize"), self.dequantize, get_args(Plain))

    @property
    def changes_bytes(self) -> bool:
        return self.dtype is not None or self.dequantize is not None


def convert(checkpoint: Checkpoint, conversion: Conversion) -> Checkpoint:
    """Return a checkpoint whose tensors are converted when they are read.

    Raises:
        SourceError, UsageError: see `dequantize` and `cast_checkpoint`.
        UsageError: a cast of a training checkpoint, which has optimizer state.
    """
    if conversion.dequantize is not None:
        from reshard.transforms.dequantize import dequantize

        checkpoint = dequantize(checkpoint, STORED[conversion.dequantize])
    if conversion.dtype is not None:
        if checkpoint.moments:
            problem = "cannot cast the weights of a training checkpoint, which has optimizer state"
            raise UsageError(
                Parameter("conversion.dtype"),
                problem,
                "leave it out; reshard export --dtype casts",
                code="options.dtype-with-optimizer-state",
            )
        checkpoint = cast_checkpoint(checkpoint, conversion.dtype, Parameter("conversion.dtype"))
    return replace(checkpoint, merges_slices=conversion.merge_slices or checkpoint.merges_slices)
