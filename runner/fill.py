"""One tensor's bytes into memory that is already there, hashed on the way."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manifests.digest import Hasher
from stores.base import Reader

__all__ = ["TORCH_DTYPES", "fill"]

_BLOCK_NBYTES = 1 << 20  # stays in the processor's cache between read, hash and copy

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@torch.no_grad()
def fill(
    parameter: torch.Tensor, dtype: torch.dtype, reader: Reader, position: int, hasher: Hasher | None = None
) -> None:
    """Read a whole tensor, stored as `dtype` from `position` on, and hash its bytes as they pass if asked.

    The bytes go straight into the parameter where it lies on the CPU in the stored dtype, and
    through one small block where it does not.
    """
    target = parameter.detach().view(-1)
    nbytes = target.numel() * dtype.itemsize
    direct = target.device.type == "cpu" and target.dtype == dtype
    staging = target if direct else torch.empty(_BLOCK_NBYTES // dtype.itemsize, dtype=dtype)
    room = staging.view(torch.uint8).numpy().data
    done = 0
    while done < nbytes:
        begin = done if direct else 0
        part = room[begin : begin + min(_BLOCK_NBYTES, nbytes - done)]
        reader.read_into(part, position + done)
        if hasher is not None:
            hasher.update(part)
        if not direct:
            first, count = done // dtype.itemsize, len(part) // dtype.itemsize
            target[first : first + count].copy_(staging[:count])
        done += len(part)
