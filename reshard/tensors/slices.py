"""Slices of tensors, as several ranks wrote them: merged when they are read, and cut into rows, also of heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import product
from math import prod
from operator import attrgetter

from manifests.errors import SourceError
from manifests.safetensors import nbytes_of
from manifests.slices import Slice
from reshard.tensors.lazy import STEP_NBYTES, BlockReader, Buffer, DerivedFile, derive, read_blocks
from stores.bundles import TensorAt

_LEAST_STEP_NBYTES = 64 << 10

Slices = tuple[TensorAt, ...]


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


def rows_of(slices: Slices, ranges: Sequence[tuple[int, int]]) -> Slices:
    """Return the slices of the tensor that consists of these ranges of rows, each (begin, count), in this order."""
    _check_contiguous(slices)
    num_rows = sum(count for _, count in ranges)
    rows, position = list[TensorAt](), 0
    for begin, count in ranges:
        for part in slices:
            first = max(begin, part.offset[0])
            num = min(begin + count, part.offset[0] + part.shape[0]) - first
            if num > 0:
                row_nbytes = part.nbytes // part.shape[0]
                shape = (num, *part.shape[1:])
                whole = (num_rows, *part.whole_shape[1:])
                region = Slice(offset=(position + first - begin, *part.offset[1:]), shape=shape, whole_shape=whole)
                at = part.begin + (first - part.offset[0]) * row_nbytes
                rows.append(TensorAt(part.name, part.dtype, shape, part.file, at, num * row_nbytes, None, region))
        position += count
    return tuple(rows)


def indices_of(slices: Slices) -> list[Slices]:
    """Return the slices of the tensor at each index of the first axis, such as an expert's or a layer's of a stack.

    An index that no slice has gets none.
    """
    _check_contiguous(slices)
    by_index: list[list[TensorAt]] = [[] for _ in range(slices[0].whole_shape[0])]
    for part in slices:
        nbytes = part.nbytes // max(1, part.shape[0])
        region = Slice(offset=part.offset[1:], shape=part.shape[1:], whole_shape=part.whole_shape[1:])
        inner = None if region.shape == region.whole_shape else region
        for at in range(part.shape[0]):
            begin = part.begin + at * nbytes
            new = TensorAt(part.name, part.dtype, region.shape, part.file, begin, nbytes, None, inner)
            by_index[part.offset[0] + at].append(new)
    return list(map(tuple, by_index))


def _check_contiguous(slices: Slices) -> None:
    for part in slices:
        if isinstance(part.file, DerivedFile):
            problem = "has several weights that are not contiguous in their file, which is not supported"
            hint = (
                "save contiguous tensors, or convert the checkpoint to Hugging Face's format with its trainer's tools"
            )
            raise SourceError(part.place, problem, hint, code="source.strided-stack")


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedHeads:
    """The rows of a fused projection of attention: for each key head its queries, itself and its value."""

    num_queries: int
    num_keys: int

    @classmethod
    def of(cls, config: Mapping[str, object]) -> FusedHeads:
        queries = config["num_attention_heads"]
        keys = config.get("num_key_value_heads") or queries
        assert isinstance(queries, int), "model_shape checked it"
        assert isinstance(keys, int), "model_shape checked it"
        return cls(num_queries=queries, num_keys=keys)

    def num_heads(self, part: str) -> int:
        """Return the heads of a part: `q`, `k` or `v`."""
        return self.num_queries if part == "q" else self.num_keys

    def ranges(self, part: str, num_rows: int) -> list[tuple[int, int]]:
        """Return the ranges of rows, (begin, count), of a part with `num_rows` rows in each head."""
        per_key = self.num_queries // self.num_keys
        begin, count = {"q": (0, per_key), "k": (per_key, 1), "v": (per_key + 1, 1)}[part]
        return [((key * (per_key + 2) + begin) * num_rows, count * num_rows) for key in range(self.num_keys)]

    def split(self, slices: Slices) -> dict[str, Slices]:
        """Return the query, key and value projections that slices of the fused one have."""
        num_rows, rest = divmod(slices[0].whole_shape[0], self.num_queries + 2 * self.num_keys)  # of a head
        if rest or self.num_queries % self.num_keys:
            heads = f"{self.num_queries} query heads and {self.num_keys} key heads"
            problem = f"expected the rows of {heads} (config.json), found {slices[0].whole_shape[0]} rows"
            hint = "download weights and config from one revision"
            raise SourceError(f"{slices[0].place}.shape", problem, hint, code="source.shape-mismatch")
        return {part: rows_of(slices, self.ranges(part, num_rows)) for part in "qkv"}

    def places(self, part: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Return the shape of the fused projection, and where it has each range of rows of a part of this shape."""
        num_rows, others = shape[0] // self.num_heads(part), shape[1:]
        offsets = [(begin, *(0 for _ in others)) for begin, _ in self.ranges(part, num_rows)]
        return (num_rows * (self.num_queries + 2 * self.num_keys), *others), offsets
