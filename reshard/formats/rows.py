"""Parts of sliced tensors along their first axis, as slices themselves: byte ranges of the same files."""

from __future__ import annotations

from collections.abc import Sequence

from manifests.errors import SourceError
from manifests.slices import Slice
from reshard.tensors.lazy import DerivedFile
from stores.bundles import TensorAt

_REVISION = "download weights and config from one revision"

Slices = tuple[TensorAt, ...]


def rows_of(slices: Slices, ranges: Sequence[tuple[int, int]]) -> Slices:
    """Return the slices of a tensor that has these ranges of rows, each (begin, count), one after the other.

    Raises:
        SourceError: a slice is not contiguous in its file.
    """
    _check_contiguous(slices)
    num_rows = sum(count for _, count in ranges)
    found = []
    position = 0
    for begin, count in ranges:
        for one in slices:
            first = max(begin, one.offset[0])
            num = min(begin + count, one.offset[0] + one.shape[0]) - first
            if num > 0:
                row = one.nbytes // one.shape[0]
                shape = (num, *one.shape[1:])
                whole = (num_rows, *one.whole_shape[1:])
                region = Slice(offset=(position + first - begin, *one.offset[1:]), shape=shape, whole_shape=whole)
                at = one.begin + (first - one.offset[0]) * row
                found.append(TensorAt(one.name, one.dtype, shape, one.file, at, num * row, None, region))
        position += count
    return tuple(found)


def indices_of(slices: Slices) -> list[Slices]:
    """Return the slices of the tensor at each index of the first axis, as stacked experts or layers have.

    An index that no slice has gets none.

    Raises:
        SourceError: a slice is not contiguous in its file.
    """
    _check_contiguous(slices)
    found: list[list[TensorAt]] = [[] for _ in range(slices[0].whole_shape[0])]
    for one in slices:
        nbytes = one.nbytes // max(1, one.shape[0])
        region = Slice(offset=one.offset[1:], shape=one.shape[1:], whole_shape=one.whole_shape[1:])
        part = None if region.shape == region.whole_shape else region
        for at in range(one.shape[0]):
            begin = one.begin + at * nbytes
            new = TensorAt(one.name, one.dtype, region.shape, one.file, begin, nbytes, None, part)
            found[one.offset[0] + at].append(new)
    return list(map(tuple, found))


def fused_heads(slices: Slices, num_queries: int, num_keys: int) -> dict[str, Slices]:
    """Return the query, key and value rows of a fused projection: for each key head its queries, itself, its value.

    Raises:
        SourceError: a slice is not contiguous in its file.
    """
    per_key = num_queries // num_keys
    rows, rest = divmod(slices[0].whole_shape[0], num_queries + 2 * num_keys)  # of a head
    if rest or num_queries % num_keys:
        heads = f"{num_queries} query heads and {num_keys} key heads"
        problem = f"expected the rows of {heads} (config.json), found {slices[0].whole_shape[0]} rows"
        raise SourceError(
            f"{slices[0].file}: {slices[0].name!r}.shape", problem, _REVISION, code="source.shape-mismatch"
        )
    parts = {"q": (0, per_key), "k": (per_key, 1), "v": (per_key + 1, 1)}
    return {
        part: rows_of(
            slices, [((group * (per_key + 2) + begin) * rows, count * rows) for group in range(num_keys)]
        )
        for part, (begin, count) in parts.items()
    }  # fmt: skip


def _check_contiguous(slices: Slices) -> None:
    for one in slices:
        if isinstance(one.file, DerivedFile):
            problem = "has several weights that are not contiguous in their file, which is not supported"
            hint = (
                "save contiguous tensors, or convert the checkpoint to Hugging Face's format with its trainer's tools"
            )
            raise SourceError(f"{one.file}: {one.name!r}", problem, hint, code="source.strided-stack")
