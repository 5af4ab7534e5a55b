"""diff: two checkpoints beside each other, tensor by tensor, whatever their layouts."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from struct import unpack
from typing import Literal

from manifests.models import module_of
from manifests.schema import MOMENTS, WEIGHTS, Holds
from reshard.checkpoint import Checkpoint, TensorAt
from reshard.engine import hash_tensors

__all__ = ["DiffReport", "TensorDifference", "diff", "nbytes_to_hash"]

_BLOCK_NBYTES = 1 << 20
Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """A tensor that the two do not share, `*` for all of a kind; the norms are of B - A and of A."""

    holds: Holds
    fqn: str
    problem: str
    norm: float | None = None
    norm_a: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffReport:
    """What was compared. `num_moved` counts the tensors that are equal and lie on a stage of another number."""

    layouts: tuple[str, str]
    num_equal: int
    num_moved: int
    differences: tuple[TensorDifference, ...]


def diff(
    a: Checkpoint, b: Checkpoint, *, with_norms: bool = False, progress: Progress = lambda nbytes: None
) -> DiffReport:
    """Compare two checkpoints by the digests that they carry; only tensors that carry none are read.

    With norms, tensors whose bytes differ are read, where both are of one shape and floating point.

    Raises:
        InputError: a file cannot be read to its end.
    """
    num_equal, num_moved, differences = 0, 0, list[TensorDifference]()
    stages = _stages(a), _stages(b)
    for holds in (WEIGHTS, *MOMENTS):
        left, right = _tensors(a, holds), _tensors(b, holds)
        if left and right:
            left, right = _with_digests(left, progress), _with_digests(right, progress)
        elif left or right:
            problem = f"all {len(left or right)} are only in {'A' if left else 'B'}"
            differences.append(TensorDifference(holds=holds, fqn="*", problem=problem))
            continue
        for fqn in dict.fromkeys((*left, *right)):
            found = _compare(holds, fqn, left.get(fqn), right.get(fqn))
            if found is not None:
                differences.append(_measure(found, left.get(fqn), right.get(fqn)) if with_norms else found)
                continue
            num_equal += 1
            num_moved += len({modules.get(module_of(fqn, modules) or "") for modules in stages} - {None}) > 1
    return DiffReport(
        layouts=(_layout(a), _layout(b)), num_equal=num_equal, num_moved=num_moved, differences=tuple(differences)
    )


def nbytes_to_hash(a: Checkpoint, b: Checkpoint) -> int:
    """Give the bytes of the tensors that carry no digest."""
    found = (tensor for checkpoint in (a, b) for tensor in checkpoint.tensors.values())
    return sum(tensor.nbytes for tensor in found if tensor.digest is None)


def _tensors(checkpoint: Checkpoint, holds: Holds) -> Mapping[str, TensorAt]:
    return checkpoint.tensors if holds == WEIGHTS else checkpoint.moments.get(holds, {})


def _with_digests(tensors: Mapping[str, TensorAt], progress: Progress) -> Mapping[str, TensorAt]:
    unknown = [tensor for tensor in tensors.values() if tensor.digest is None]
    digests = dict(zip((tensor.name for tensor in unknown), hash_tensors(unknown, progress), strict=True))
    return {fqn: replace(tensor, digest=digests.get(fqn, tensor.digest)) for fqn, tensor in tensors.items()}


def _compare(holds: Holds, fqn: str, a: TensorAt | None, b: TensorAt | None) -> TensorDifference | None:
    if a is None or b is None:
        problem = f"only in {'A' if b is None else 'B'}"
    elif (a.dtype, a.shape) != (b.dtype, b.shape):
        problem = f"{a.dtype} {list(a.shape)} in A, {b.dtype} {list(b.shape)} in B"
    elif a.digest != b.digest:
        problem = "bytes differ"
    else:
        return None
    return TensorDifference(holds=holds, fqn=fqn, problem=problem)


def _stages(checkpoint: Checkpoint) -> dict[str, int]:
    """Give the number of each module's stage; nothing for a checkpoint without a layout."""
    stages = checkpoint.manifest.stages if checkpoint.manifest else ()
    return {module: stage.index for stage in stages for module in stage.modules}


def _layout(checkpoint: Checkpoint) -> str:
    if checkpoint.manifest is None:
        return "none"
    layout = checkpoint.manifest.layout
    return f"{layout.spec}: {layout.num_stages} stages on {layout.num_ranks} ranks, style {layout.style}"


def _measure(found: TensorDifference, a: TensorAt | None, b: TensorAt | None) -> TensorDifference:
    """Add the norms, block by block, where both are numbers of one shape."""
    if a is None or b is None or a.shape != b.shape or not {a.dtype, b.dtype} <= _READ.keys():
        return found
    apart, own = list[float](), list[float]()
    for left, right in zip(_values(a), _values(b), strict=True):
        apart.append(math.dist(left, right))
        own.append(math.hypot(*left))
    norm, norm_a = math.hypot(*apart), math.hypot(*own)
    if not (math.isfinite(norm) and math.isfinite(norm_a)):
        return replace(found, problem=f"{found.problem}, and not all values are finite")
    return replace(found, norm=norm, norm_a=norm_a)


def _values(tensor: TensorAt) -> Iterator[tuple[float, ...]]:
    width, read = _READ[tensor.dtype]
    reader = tensor.file.open(((tensor.begin, tensor.end),))
    step = _BLOCK_NBYTES // 8 * width  # as many values a block, whatever their width
    try:
        for begin in range(tensor.begin, tensor.end, step):
            block = bytearray(min(step, tensor.end - begin))
            reader.read_into(memoryview(block), begin)
            yield tuple(read(block))
    finally:
        reader.close()


def _native(code: Literal["d", "f"]) -> Callable[[bytearray], array[float]]:
    def read(block: bytearray) -> array[float]:
        values = array(code, bytes(block))
        if sys.byteorder == "big":
            values.byteswap()
        return values

    return read


def _brain(block: bytearray) -> array[float]:
    """Widen BF16, the upper half of an F32."""
    wide = bytearray(2 * len(block))
    wide[2::4], wide[3::4] = block[::2], block[1::2]
    return _native("f")(wide)


def _half(block: bytearray) -> tuple[float, ...]:
    return unpack(f"<{len(block) // 2}e", block)


# By dtype: bytes a value, and what makes values of a block.
_READ: Mapping[str, tuple[int, Callable[[bytearray], array[float] | tuple[float, ...]]]] = {
    "F64": (8, _native("d")),
    "F32": (4, _native("f")),
    "BF16": (2, _brain),
    "F16": (2, _half),
}
