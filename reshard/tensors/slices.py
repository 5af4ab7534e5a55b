"""Merges the slices of a tensor, as several ranks wrote them, when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import product
from math import prod
from operator import attrgetter

from manifests.safetensors import nbytes_of
from reshard.tensors.lazy import STEP_NBYTES, BlockReader, Buffer, DerivedFile, derive, read_blocks
from stores.bundles import TensorAt

_LEAST_STEP_NBYTES = 64 << 10


def merge_slices(slices: Sequence[TensorAt]) -> TensorAt:
    """Return the tensor of these slices (see `join_slices`); they are merged when it is read."""
    first = slices[0]
    if len(slices) == 1:
        return replace(first, part=None) if first.part else first
    whole = replace(first, shape=first.whole_shape, part=None)
    filled = tuple(part for part in slices if part.nbytes) or (first,)
    how = f"merged from {len(slices)} slices"
    return derive(whole, first.dtype, how, tuple(slices), partial(_merged_blocks, filled))


def slices_of(tensor: TensorAt) -> tuple[TensorAt, ...]:
    """Return the slices that a tensor is merged from, under its name; the tensor itself if it is not sliced."""
    file = tensor.file
    if isinstance(file, DerivedFile) and isinstance(file.make, partial) and file.make.func is _merged_blocks:
        return tuple(replace(part, name=tensor.name) for part in file.origins)
    return (tensor,)


def pieces_of(tensor: TensorAt) -> tuple[TensorAt, ...]:
    """Return the byte ranges that a tensor consists of, in order: those of its slices, if they are of whole rows.

    Slices with digests are verified as they are merged, so that the tensor is its own piece.
    """
    slices = [part for part in slices_of(tensor) if part.nbytes]
    if len(slices) < 2 or any(part.blake3 is not None or not _is_of_rows(part) for part in slices):
        return (tensor,)
    return tuple(sorted(slices, key=attrgetter("offset")))


def _is_of_rows(part: TensorAt) -> bool:
    return part.shape[1:] == part.whole_shape[1:]


def _merged_blocks(slices: Sequence[TensorAt]) -> Iterator[Buffer]:
    """Yield a tensor's bytes in order: always the next run, whichever slice has it.

    Each slice is read once, in order.
    """
    are_rows = all(map(_is_of_rows, slices))
    step = STEP_NBYTES if are_rows else max(_LEAST_STEP_NBYTES, STEP_NBYTES // len(slices))
    runs = [_runs_of(part) for part in slices]
    coming = [(next(begins), number) for number, (begins, _) in enumerate(runs)]
    heapify(coming)
    block = memoryview(bytearray(STEP_NBYTES))
    filled = 0
    with ExitStack() as stack:
        readers = [
            stack.enter_context(closing(BlockReader(part.nbytes, partial(read_blocks, part, step)))) for part in slices
        ]
        while coming:
            _, number = coming[0]
            begins, remaining = runs[number]
            while remaining:
                count = min(remaining, STEP_NBYTES - filled)
                readers[number].read_into(block[filled : filled + count])
                remaining, filled = remaining - count, filled + count
                if filled == STEP_NBYTES:
                    yield block
                    filled = 0
            following = next(begins, None)
            if following is None:
                heappop(coming)
            else:
                heapreplace(coming, (following, number))
    if filled:
        yield block[:filled]


def _runs_of(part: TensorAt) -> tuple[Iterator[int], int]:
    """Return the offset of each run of a slice in the whole tensor, in elements, and the bytes of a run."""
    whole, cut = part.whole_shape, 0
    for axis, (size, all_of_it) in enumerate(zip(part.shape, whole, strict=True)):
        if size != all_of_it:
            cut = axis  # after the last sliced axis, a run spans the whole axes
    strides = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    begin = sum(offset * stride for offset, stride in zip(part.offset, strides, strict=True))
    steps = [range(0, size * stride, stride) for size, stride in zip(part.shape[:cut], strides, strict=False)]
    return (begin + sum(step) for step in product(*steps)), nbytes_of(part.dtype, part.shape[cut:])
