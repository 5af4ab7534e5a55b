"""Casts of tensors when they are read, and comparisons of values that may need one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import prod

from manifests.errors import Parameter, SourceError
from manifests.safetensors import DTYPE_BITS
from reshard.copy.engine import hash_tensors
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.lazy import STEP_NBYTES, WOULD_OVERFLOW, DerivedFile, derive, have_equal_bytes
from stores.bundles import TensorAt

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def cast_tensor(tensor: TensorAt, dtype: str) -> TensorAt:
    """Return a tensor whose values are cast when they are read; the tensor itself if it has that dtype."""
    if tensor.dtype == dtype:
        return tensor
    from reshard.transforms.arithmetic import cast_blocks  # numpy

    return derive(tensor, dtype, f"as {dtype}", (tensor,), partial(cast_blocks, tensor, dtype))


def have_equal_samples(
    first: TensorAt, second: TensorAt, dtype: str, progress: Callable[[int], object] = lambda nbytes: None
) -> bool:
    """Return whether two tensors have one shape, and equal values at the start, in the middle and at the end.

    Values of different floating dtypes are compared in `dtype`. At most 1 MiB of each tensor is read at a place, and
    nothing where both have digests. A derived tensor, such as a strided one, is read whole. `progress` is called with
    the bytes that are read.
    """
    kinds = {first.dtype, second.dtype}
    if first.shape != second.shape or not (len(kinds) == 1 or kinds <= FLOATS):
        return False
    common = first.dtype if len(kinds) == 1 else dtype
    have_digests = len(kinds) == 1 and None not in (first.blake3, second.blake3)
    pairs: Iterable[tuple[TensorAt, TensorAt]] = [(first, second)]
    if not have_digests and not any(isinstance(tensor.file, DerivedFile) for tensor in (first, second)):
        count = STEP_NBYTES // max(1, *(DTYPE_BITS[kind] // 8 for kind in kinds))
        pairs = zip(_samples(first, count), _samples(second, count), strict=True)
    try:
        for part, copy in pairs:
            progress(0 if have_digests else part.nbytes + copy.nbytes)
            if not have_equal_bytes(cast_tensor(part, common), cast_tensor(copy, common)):
                return False
    except SourceError as error:
        if error.code != WOULD_OVERFLOW:
            raise
        return False
    return True


def _samples(tensor: TensorAt, count: int) -> Iterator[TensorAt]:
    """Yield `count` elements, if there are so many, at the start of a tensor, in its middle and at its end."""
    total, bits = prod(tensor.shape), DTYPE_BITS[tensor.dtype]
    count = min(count, total)
    for first in sorted({0, (total - count) // 16 * 8, total - count}):  # of 8, as some dtypes have 4 or 6 bits
        begin, nbytes = tensor.begin + first * bits // 8, count * bits // 8
        yield replace(tensor, shape=(count,), begin=begin, nbytes=nbytes, blake3=None)


def check_stored_ties(checkpoint: Checkpoint, *, can_drop: bool = True) -> None:
    """Refuse a source that stores a tied weight twice with different bytes or dtypes: one of them would be lost."""
    for group in checkpoint.shape.ties:
        stored = [checkpoint.tensors[fqn] for fqn in group if fqn in checkpoint.tensors]
        kinds = {tensor.dtype for tensor in stored}
        places = {(tensor.file, tensor.begin) for tensor in stored}  # one, of names that torch.save wrote
        if len(places) > 1 and (len(kinds) > 1 or len(set(hash_tensors(stored))) > 1):
            how = "in different dtypes" if len(kinds) > 1 else "with different values"
            drop = f", or pass {Parameter('drop', [stored[-1].name])}" if can_drop else ""
            raise SourceError(
                str(stored[0].file),
                f"the config ties {' and '.join(group)}, but the files store them {how}",
                f"set tie_word_embeddings to false to keep both{drop}",
                code="source.tied-values-differ",
            )
