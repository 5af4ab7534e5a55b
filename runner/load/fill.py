"""A stored tensor's bytes, or those of a box of it, into memory that is already there, hashed on the way."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from manifests.digest import Hasher
from manifests.slices import Slice
from runner.tensors.pinned import PinnedBlocks
from runner.tensors.regions import Block, blocks_of
from stores.base import Reader

__all__ = ["TORCH_DTYPES", "bytes_of", "fill"]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@torch.no_grad()
def fill(
    target: torch.Tensor,
    dtype: torch.dtype,
    reader: Reader,
    position: int,
    box: Slice,
    hasher: Hasher | None = None,
    staging: PinnedBlocks | None = None,
) -> None:
    """Read a box of a tensor, stored as `dtype` from `position` on, and hash its bytes as they pass if asked.

    The bytes go straight into the target where they lie there as they are stored, on the CPU, in the
    same dtype and without gaps, and through the blocks of `staging` where they do not; without one of the
    caller's they have arrived when this ends, otherwise when that is finished.

    Shapes: `target` is the box; `box.whole_shape` is what is stored.
    """
    stored, scalar = box.whole_shape, not box.whole_shape
    if scalar:
        target, stored, box = target.view(1), (1,), Slice(offset=(0,), shape=(1,), whole_shape=(1,))
    blocks = staging or PinnedBlocks(target.device)
    for block in blocks_of(stored, box, dtype.itemsize):
        rows = target[block.index]
        direct = _is_direct(rows, block, dtype)
        read = rows if direct else blocks.take(dtype, block.nbytes // dtype.itemsize).view(block.rows)
        room = bytes_of(read)
        reader.read_into(room, position + block.begin)
        if hasher is not None:
            hasher.update(room)
        if not direct:
            for dim, begin in enumerate(block.inner, start=1):
                read = read.narrow(dim, begin, rows.shape[dim])
            rows.copy_(read, non_blocking=True)
            blocks.sent()
    if staging is None:
        blocks.finish()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Give the memory of a contiguous tensor on the CPU."""
    # A view of one element may be contiguous and have a stride, which torch does not look past.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _is_direct(rows: torch.Tensor, block: Block, dtype: torch.dtype) -> bool:
    is_as_stored = rows.device.type == "cpu" and rows.dtype == dtype and rows.shape == block.rows
    return is_as_stored and rows.is_contiguous()
