"""diff: two checkpoints compared tensor by tensor, whatever their layouts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.models import module_of
from manifests.schema import WEIGHTS, Holds
from manifests.slices import Slice
from reshard.checks.compare import tensors_of
from reshard.copy.engine import hash_tensors
from reshard.copy.runs import ByteCounter, Progress, counting
from reshard.formats.open import open_both
from reshard.formatting import describe_layout
from reshard.tensors.checkpoint import Checkpoint, check_digest
from reshard.tensors.comparison import are_of_one_kind
from reshard.tensors.slices import slices_of
from reshard.transforms.casts import FLOATS
from stores.bundles import TensorAt


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """A tensor that differs between A and B, or `num_tensors` that are all of a kind, with `*` as `fqn`.

    `dtypes` are those in A and B of a tensor that has the same shape in both, and another dtype. Norms (float64) are of
    B - A and of A, and None if values were not compared, or not all of them are finite.
    """

    holds: Holds
    fqn: str
    problem: str
    dtypes: tuple[str, str] | None = None
    norm: float | None = None
    norm_a: float | None = None
    is_finite: bool = True
    num_tensors: int = 1

    @property
    def relative(self) -> float | None:
        """The norm of the difference relative to that of A; None if A is zero."""
        return self.norm / self.norm_a if self.norm is not None and self.norm_a else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffResult:
    """The result of comparing two checkpoints.

    Of the equal tensors, `num_moved` are on a stage with another index, and `num_resliced` are stored in other slices.
    """

    layouts: tuple[str, str]
    num_equal: int
    num_moved: int
    num_resliced: int
    differences: tuple[TensorDifference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


def diff(
    a: str | Path,
    b: str | Path,
    *,
    model: str | Path | None = None,
    with_norms: bool = False,
    reads_bytes: bool = False,
    progress: Progress | None = None,
) -> DiffResult:
    """Compare the weights and the optimizer state of two checkpoints, tensor by tensor, whatever their layouts.

    `a` and `b` are manifests or Hugging Face folders; `model` is that of `plan`, where no manifest describes them.
    Tensors with digests are not read, unless `reads_bytes` asks for all of them, or they differ and `with_norms` asks
    for the norm of B - A (float64, of floating-point tensors of the same shape).

    Units: progress is called with bytes read and bytes in total.
    Raises:
        SourceError, ModelError, ManifestError: one of them is not a checkpoint.
        ShardError: a file is truncated or damaged.

    Example:
        >>> done = reshard.diff("model-pp2", "model-pp4")
        >>> done.equal, done.num_equal, done.num_moved
        (True, 39, 20)
    """
    checkpoints = open_both(str(a), str(b), None if model is None else Path(model))
    counter = counting(progress, _nbytes_to_hash(*checkpoints, reads_bytes=reads_bytes))
    return _compare_checkpoints(*checkpoints, with_norms, reads_bytes, counter)


def _compare_checkpoints(
    a: Checkpoint, b: Checkpoint, with_norms: bool, reads_bytes: bool, progress: ByteCounter
) -> DiffResult:
    num_equal, num_moved, num_resliced, differences = 0, 0, 0, list[TensorDifference]()
    stages = _stages(a), _stages(b)
    for holds in _kinds(a, b):
        tensors_a, tensors_b = tensors_of(a, holds) or {}, tensors_of(b, holds) or {}
        tensors_a, tensors_b = _with_tied(tensors_a, a, tensors_b), _with_tied(tensors_b, b, tensors_a)
        if bool(tensors_a) != bool(tensors_b):
            num = len(tensors_a or tensors_b)
            problem = f"all {num} only in {'A' if tensors_a else 'B'}"
            differences.append(TensorDifference(holds=holds, fqn="*", problem=problem, num_tensors=num))
            continue
        same = (fqn for fqn in tensors_a if fqn in tensors_b and _are_same_slices(tensors_a[fqn], tensors_b[fqn]))
        equal = set() if reads_bytes else set(same)
        here, there = (_with_digests(tensors, equal, reads_bytes, progress) for tensors in (tensors_a, tensors_b))
        for fqn in dict.fromkeys((*here, *there)):
            pair = here.get(fqn), there.get(fqn)
            difference = _compare(holds, fqn, *pair)
            if difference is not None:
                differences.append(_measure(difference, *pair) if with_norms else difference)
                continue
            num_equal += 1
            num_moved += len({modules.get(module_of(fqn, modules) or "") for modules in stages} - {None}) > 1
            num_resliced += _boxes(here[fqn]) != _boxes(there[fqn])
    return DiffResult(
        layouts=(_layout(a), _layout(b)),
        num_equal=num_equal,
        num_moved=num_moved,
        num_resliced=num_resliced,
        differences=tuple(differences),
    )


def _kinds(a: Checkpoint, b: Checkpoint) -> tuple[Holds, ...]:
    """Return weights, and each kind of optimizer state that one of them has."""
    return (WEIGHTS, *dict.fromkeys((*a.moments, *b.moments)))


def _with_tied(
    tensors: Mapping[str, TensorAt], checkpoint: Checkpoint, others: Mapping[str, TensorAt]
) -> Mapping[str, TensorAt]:
    """Add the names of tied tensors that are not stored here, and are in the other checkpoint."""
    tied = dict[str, TensorAt]()
    for group in checkpoint.shape.ties:
        stored = next((tensors[fqn] for fqn in group if fqn in tensors), None)
        if stored is not None:
            tied |= {fqn: replace(stored, name=fqn) for fqn in group if fqn in others and fqn not in tensors}
    return {**tensors, **tied} if tied else tensors


def _nbytes_to_hash(a: Checkpoint, b: Checkpoint, *, reads_bytes: bool) -> int:
    """Return an estimate of the bytes to read for digests."""
    kinds = (tensors_of(checkpoint, holds) or {} for checkpoint in (a, b) for holds in _kinds(a, b))
    return sum(
        tensor.nbytes for tensors in kinds for tensor in tensors.values() if reads_bytes or tensor.blake3 is None
    )


def _are_same_slices(a: TensorAt, b: TensorAt) -> bool:
    """Whether two tensors are sliced alike with equal digests, so that neither must be read."""
    slices_a, slices_b = ([(part.dtype, part.part, part.blake3) for part in slices_of(tensor)] for tensor in (a, b))
    return len(slices_a) > 1 and slices_a == slices_b and all(digest is not None for *_, digest in slices_a)


def _boxes(tensor: TensorAt) -> list[Slice | None]:
    return [part.part for part in slices_of(tensor)]


def _with_digests(
    tensors: Mapping[str, TensorAt], equal: Collection[str], reads_bytes: bool, progress: ByteCounter
) -> dict[str, TensorAt]:
    """Return the tensors with digests, computed for all but those whose slices have equal ones."""
    unread = [
        tensor for tensor in tensors.values() if (reads_bytes or tensor.blake3 is None) and tensor.name not in equal
    ]
    unread.sort(key=lambda tensor: (str(tensor.file), tensor.begin))  # one of A and B may be in another order
    digests = hash_tensors(unread, progress)
    for tensor, digest in zip(unread, digests, strict=True):
        check_digest(tensor, digest)
    hashed = zip(unread, map(bytes.fromhex, digests), strict=True)
    return {**tensors, **{tensor.name: replace(tensor, blake3=digest) for tensor, digest in hashed}}


def _compare(holds: Holds, fqn: str, a: TensorAt | None, b: TensorAt | None) -> TensorDifference | None:
    dtypes = None
    if a is None or b is None:
        problem = f"only in {'A' if b is None else 'B'}"
    elif not are_of_one_kind(a, b):
        dtypes = (a.dtype, b.dtype) if a.shape == b.shape else None
        problem = f"{a.dtype} {list(a.shape)} in A, {b.dtype} {list(b.shape)} in B"
    elif a.blake3 != b.blake3:
        problem = "bytes differ"
    else:
        return None
    return TensorDifference(holds=holds, fqn=fqn, problem=problem, dtypes=dtypes)


def _stages(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the stage index of each module; empty for a checkpoint without a layout."""
    stages = checkpoint.manifest.stages if checkpoint.manifest else ()
    return {module: stage.index for stage in stages for module in stage.modules}


def _layout(checkpoint: Checkpoint) -> str:
    return "none" if checkpoint.manifest is None else describe_layout(checkpoint.manifest.layout)


def _measure(difference: TensorDifference, a: TensorAt | None, b: TensorAt | None) -> TensorDifference:
    """Add the norms, in float64, if both are floating point and of the same shape."""
    if a is None or b is None or a.shape != b.shape or not {a.dtype, b.dtype} <= FLOATS:
        return difference
    from reshard.transforms.arithmetic import norms_of  # numpy

    norm, norm_a = norms_of(a, b)
    if not (math.isfinite(norm) and math.isfinite(norm_a)):
        return replace(difference, problem=f"{difference.problem}, and not all values are finite", is_finite=False)
    return replace(difference, norm=norm, norm_a=norm_a)
