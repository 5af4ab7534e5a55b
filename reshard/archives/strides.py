"""Tensors whose elements are not adjacent in their storage, such as transposed ones, gathered when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Literal

from manifests.errors import SourceError
from manifests.headertext import DTYPE_BITS
from reshard.tensors.lazy import STEP_NBYTES, Buffer, derive, read_blocks
from stores.base import read_range
from stores.bundles import TensorAt

_MAX_NBYTES = 1 << 30  # of the storage, which is read whole, and of the tensor
_FORMATS: Mapping[int, Literal["B", "H", "I", "Q"]] = {
    1: "B",
    2: "H",
    4: "I",
    8: "Q",
}  # of memoryviews, by bytes of an element


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether a tensor's elements are adjacent and in order; strides of axes of size 1 mean nothing."""
    pairs = zip(shape, strides, _contiguous_strides(shape), strict=True)
    return all(size == 1 or step == expected for size, step, expected in pairs)


def gathered(tensor: TensorAt, strides: tuple[int, ...], num_spanned: int) -> TensorAt:
    """Return a tensor whose first element is at `tensor.begin`, and whose others follow at `strides`, in elements.

    Its `num_spanned` elements of storage are in memory while it is read.

    Raises:
        SourceError: they take more than 1 GiB.
    """
    width = DTYPE_BITS[tensor.dtype] // 8
    span = TensorAt(
        tensor.name, tensor.dtype, (num_spanned,), tensor.file, tensor.begin, num_spanned * width, None, None
    )
    found = max(span.nbytes, tensor.nbytes)
    if found > _MAX_NBYTES:
        raise SourceError(
            f"{tensor.file}: {tensor.name!r}",
            f"is not contiguous: expected at most {_MAX_NBYTES} bytes, found {found}",
            "save its .contiguous() instead",
            code="source.large-strided-tensor",
        )
    make = partial(_gather, span, tensor.shape, strides, width)
    return derive(tensor, tensor.dtype, "made contiguous", (span,), make)


def swapped(tensor: TensorAt) -> TensorAt:
    """Return a tensor of three axes with the last two swapped. One index of the first is in memory at a time."""
    *outer, rows, columns = tensor.shape
    new = replace(tensor, shape=(*outer, columns, rows))
    return derive(new, tensor.dtype, "with its last two axes swapped", (tensor,), partial(_swap, tensor))


def _swap(tensor: TensorAt) -> Iterator[Buffer]:
    count, _, columns = tensor.shape
    for matrix in read_blocks(tensor, max(1, tensor.nbytes // max(1, count))):
        elements = matrix.cast(_FORMATS[DTYPE_BITS[tensor.dtype] // 8])
        yield b"".join(elements[column::columns].tobytes() for column in range(columns))


def _gather(span: TensorAt, shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> Iterator[Buffer]:
    """Yield the elements in the tensor's order, a few rows along the last axis at a time."""
    elements = memoryview(read_range(span.file, span.begin, span.end)).cast(_FORMATS[width])
    *outer, count = shape
    *steps, step = strides
    block = bytearray()
    for index in product(*map(range, outer)):
        begin = sum(at * stride for at, stride in zip(index, steps, strict=True))
        if step:
            block += elements[begin : begin + (count - 1) * step + 1 : step].tobytes()
        else:
            block += elements[begin : begin + 1].tobytes() * count
        if len(block) >= STEP_NBYTES:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)
