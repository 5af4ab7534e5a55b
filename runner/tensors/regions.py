"""Which bytes of a file make up a region of a stored tensor. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from manifests.slices import Slice

BLOCK_NBYTES = 1 << 20  # stays in the processor's cache between read, hash and copy
_GAP_NBYTES = 4096  # a smaller gap between two wanted parts is read along with them: disks read pages
_Index = tuple[int | slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Bytes that are read at once: `rows` of the stored tensor, of which the region takes what begins at `inner`."""

    begin: int  # from the first byte of the stored tensor
    nbytes: int
    index: _Index  # of these rows in the region
    rows: tuple[int, ...]  # the shape of what is read
    inner: tuple[int, ...]  # where the region begins in each row


def intersect(one: Slice, other: Slice) -> Slice | None:
    """Return the intersection of two regions of a tensor; None if it is empty."""
    begin = tuple(map(max, one.offset, other.offset))
    shape = tuple(last - first for first, last in zip(begin, map(min, one.end, other.end), strict=True))
    return Slice(offset=begin, shape=shape, whole_shape=one.whole_shape) if all(n > 0 for n in shape) else None


def blocks_of(stored: tuple[int, ...], region: Slice, itemsize: int) -> Iterator[Block]:
    """Split a region of a stored tensor into blocks, in the order of their bytes.

    The region has at least one element, the stored tensor at least one dimension; `region.offset` is within it.
    """
    return _split(stored, region.offset, region.shape, itemsize, 0, ())


def ranges_of(stored: tuple[int, ...], region: Slice, itemsize: int) -> Iterator[tuple[int, int]]:
    """Return the begin and end of each block of a region, ascending; see `blocks_of`."""
    return ((block.begin, block.begin + block.nbytes) for block in blocks_of(stored, region, itemsize))


def _split(
    stored: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], itemsize: int, begin: int, index: _Index
) -> Iterator[Block]:
    row_nbytes = prod(stored[1:]) * itemsize
    gap_nbytes = row_nbytes - _span(stored[1:], shape[1:]) * itemsize
    first = begin + offset[0] * row_nbytes
    if row_nbytes <= BLOCK_NBYTES and gap_nbytes < _GAP_NBYTES:
        step = BLOCK_NBYTES // row_nbytes
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
            yield from _split(stored[1:], offset[1:], shape[1:], itemsize, first + row * row_nbytes, (*index, row))


def _span(stored: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the number of elements from a region's first to its last, including those between."""
    span, stride = 1, 1
    for size, count in zip(reversed(stored), reversed(shape), strict=True):
        span += (count - 1) * stride
        stride *= size
    return span
