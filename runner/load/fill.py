"""Reading a region of a stored tensor into allocated memory: which bytes, through which blocks, hashed on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from manifests.digest import Hasher
from manifests.slices import Slice
from runner.tensors.local_shard import bytes_of
from stores.base import Reader

BLOCK_NBYTES = 1 << 20  # stays in the processor's cache between read, hash and copy
_PINNED_NBYTES = 4 << 20  # a copy to a GPU costs its start; bench/results/gpu-load.json
_GAP_NBYTES = 4096  # a smaller gap between two wanted parts is read along with them: disks read pages
_NUM_PINNED = 4  # copies to a GPU in flight while the next block is read and hashed
_Index = tuple[int | slice, ...]


@torch.no_grad()
def fill(
    target: torch.Tensor,
    dtype: torch.dtype,
    reader: Reader,
    position: int,
    region: Slice,
    hasher: Hasher | None,
    blocks: PinnedBlocks,
) -> Iterator[None]:
    """Read a region of a tensor, stored as `dtype` from `position` on, block by block; update `hasher` with its bytes.

    Bytes are read directly into the target where it is on the CPU, contiguous and of the same dtype, and elsewhere
    through `blocks`: copies have finished when those are finished.

    Shapes: `target` has the shape of `region`, which is within the stored shape `region.whole_shape`.
    """
    stored, scalar = region.whole_shape, not region.whole_shape
    if scalar:
        target, stored, region = target.view(1), (1,), Slice(offset=(0,), shape=(1,), whole_shape=(1,))
    for block in blocks_of(stored, region, dtype.itemsize, blocks.nbytes):
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
        yield


class PinnedBlocks:
    """One thread's blocks for copies to `device`: one for the CPU, several pinned blocks, used in turn, for a GPU.

    A block is taken, filled, copied from asynchronously, and marked as sent; it is reused once the copy has finished.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self.nbytes = _PINNED_NBYTES if self._is_cuda else BLOCK_NBYTES
        self._blocks: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event | None] = [None] * (_NUM_PINNED if self._is_cuda else 1)
        self._next = 0

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return room for `count` elements, at most a block."""
        if len(self._blocks) == self._next:
            self._blocks.append(torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self._is_cuda))
        if (copied := self._copied[self._next]) is not None:
            copied.synchronize()
        return self._blocks[self._next].view(dtype)[:count]

    def sent(self) -> None:
        """Note that the copy from the last block taken has been enqueued."""
        if self._is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device))
            self._copied[self._next] = copied
        self._next = (self._next + 1) % len(self._copied)

    def finish(self) -> None:
        """Wait for every copy."""
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Bytes that are read at once: `rows` of the stored tensor, of which the region takes what begins at `inner`."""

    begin: int  # from the first byte of the stored tensor
    nbytes: int
    index: _Index  # of these rows in the region
    rows: tuple[int, ...]  # the shape of what is read
    inner: tuple[int, ...]  # where the region begins in each row


def intersect(region: Slice, other: Slice) -> Slice | None:
    """Return the intersection of two regions of a tensor; None if it is empty."""
    begin = tuple(map(max, region.offset, other.offset))
    shape = tuple(last - first for first, last in zip(begin, map(min, region.end, other.end), strict=True))
    return Slice(offset=begin, shape=shape, whole_shape=region.whole_shape) if all(n > 0 for n in shape) else None


def blocks_of(stored: tuple[int, ...], region: Slice, itemsize: int, most_nbytes: int = 0) -> Iterator[Block]:
    """Split a region of a stored tensor into blocks of `most_nbytes` or BLOCK_NBYTES, in the order of their bytes.

    The region has at least one element, the stored tensor at least one dimension; `region.offset` is within it.
    """
    return _split(stored, region.offset, region.shape, itemsize, most_nbytes or BLOCK_NBYTES, 0, ())


def ranges_of(stored: tuple[int, ...], region: Slice, itemsize: int) -> Iterator[tuple[int, int]]:
    """Return the begin and end of each block of a region, ascending; see `blocks_of`."""
    return ((block.begin, block.begin + block.nbytes) for block in blocks_of(stored, region, itemsize))


def _is_direct(rows: torch.Tensor, block: Block, dtype: torch.dtype) -> bool:
    is_as_stored = rows.device.type == "cpu" and rows.dtype == dtype and rows.shape == block.rows
    return is_as_stored and rows.is_contiguous()


def _split(
    stored: tuple[int, ...],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    itemsize: int,
    most_nbytes: int,
    begin: int,
    index: _Index,
) -> Iterator[Block]:
    row_nbytes = prod(stored[1:]) * itemsize
    gap_nbytes = row_nbytes - _span(stored[1:], shape[1:]) * itemsize
    first = begin + offset[0] * row_nbytes
    # What is read and hashed depends on this one size, whatever blocks it is read in.
    if row_nbytes <= BLOCK_NBYTES and gap_nbytes < _GAP_NBYTES:
        step = most_nbytes // row_nbytes
        for row in range(0, shape[0], step):
            count = min(step, shape[0] - row)
            yield Block(
                begin=first + row * row_nbytes,
                nbytes=count * row_nbytes,
                index=(*index, slice(row, row + count)),
                rows=(count, *stored[1:]),
                inner=offset[1:],
            )
    else:
        for row in range(shape[0]):
            at = first + row * row_nbytes, (*index, row)
            yield from _split(stored[1:], offset[1:], shape[1:], itemsize, most_nbytes, *at)


def _span(stored: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the number of elements from a region's first to its last, including those between."""
    span, stride = 1, 1
    for size, count in zip(reversed(stored), reversed(shape), strict=True):
        span += (count - 1) * stride
        stride *= size
    return span
