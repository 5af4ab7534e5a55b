"""Reading a region of a stored tensor into allocated memory, hashed on the way."""

from __future__ import annotations

import torch

from manifests.digest import Hasher
from manifests.slices import Slice
from runner.tensors.pinned import PinnedBlocks
from runner.tensors.regions import Block, blocks_of
from stores.base import Reader


@torch.no_grad()
def fill(
    target: torch.Tensor,
    dtype: torch.dtype,
    reader: Reader,
    position: int,
    region: Slice,
    hasher: Hasher | None = None,
    blocks: PinnedBlocks | None = None,
) -> None:
    """Read a region of a tensor, stored as `dtype` from `position` on, and update `hasher` with its bytes.

    Bytes are read directly into the target where it is on the CPU, contiguous and of the same dtype, and elsewhere
    through blocks. With the caller's `blocks`, copies have finished only when those are finished.

    Shapes: `target` has the shape of `region`, which is within the stored shape `region.whole_shape`.
    """
    stored, scalar = region.whole_shape, not region.whole_shape
    if scalar:
        target, stored, region = target.view(1), (1,), Slice(offset=(0,), shape=(1,), whole_shape=(1,))
    pinned = blocks or PinnedBlocks(target.device)
    for block in blocks_of(stored, region, dtype.itemsize):
        rows = target[block.index]
        direct = _is_direct(rows, block, dtype)
        read = rows if direct else pinned.take(dtype, block.nbytes // dtype.itemsize).view(block.rows)
        room = bytes_of(read)
        reader.read_into(room, position + block.begin)
        if hasher is not None:
            hasher.update(room)
        if not direct:
            for dim, begin in enumerate(block.inner, start=1):
                read = read.narrow(dim, begin, rows.shape[dim])
            rows.copy_(read, non_blocking=True)
            pinned.sent()
    if blocks is None:
        pinned.finish()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    # A contiguous view of one element may have any stride, which `view` does not accept.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _is_direct(rows: torch.Tensor, block: Block, dtype: torch.dtype) -> bool:
    is_as_stored = rows.device.type == "cpu" and rows.dtype == dtype and rows.shape == block.rows
    return is_as_stored and rows.is_contiguous()
