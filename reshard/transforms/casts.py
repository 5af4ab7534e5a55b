"""Casts of tensors when they are read."""

from __future__ import annotations

from functools import partial

from reshard.tensors.lazy import derive
from stores.bundles import TensorAt

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def cast_tensor(tensor: TensorAt, dtype: str) -> TensorAt:
    """Return a tensor whose values are cast when they are read; the tensor itself if it has that dtype."""
    if tensor.dtype == dtype:
        return tensor
    from reshard.transforms.arithmetic import cast_blocks  # numpy

    return derive(tensor, dtype, f"as {dtype}", (tensor,), partial(cast_blocks, tensor, dtype))
