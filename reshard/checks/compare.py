"""Stored tensors compared with those of a source, or of another checkpoint: names, kinds and bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from manifests.digest import PREFIX
from manifests.errors import InputError
from manifests.schema import WEIGHTS, Holds, TieGroup
from reshard.copy.engine import hash_tensors
from reshard.copy.runs import ByteCounter
from reshard.formatting import count_of, some
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.comparison import Findings, are_of_one_kind, compare, other_kind
from stores.bundles import TensorAt

_BATCH = 1 << 14
_Item = TypeVar("_Item")


def tensors_of(checkpoint: Checkpoint, holds: Holds) -> Mapping[str, TensorAt] | None:
    """Return a checkpoint's weights or one kind of its optimizer state; None if it has none."""
    return checkpoint.tensors if holds == WEIGHTS else checkpoint.moments.get(holds)


def in_batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Yield items some at a time: enough to read them together, and not a million."""
    remaining = iter(items)
    while batch := list(islice(remaining, _BATCH)):
        yield batch


def hash_each(
    tensors: Sequence[TensorAt], progress: ByteCounter, findings: Findings, *, code: str = ""
) -> Sequence[str | None]:
    """Hash all tensors; one that cannot be read is added to `findings` and gets None."""
    try:
        return hash_tensors(tensors, progress)
    except (InputError, OSError):
        digests: list[str | None] = []
        for tensor in tensors:
            try:
                digests += hash_tensors([tensor])
            except (InputError, OSError) as error:
                findings.add(tensor.file, str(error), code=code)
                digests.append(None)
        return digests


def compare_bytes(
    pairs: Sequence[tuple[TensorAt, TensorAt]],
    digests: Sequence[str | None],
    progress: ByteCounter,
    findings: Findings,
    *,
    code: str = "",
    unreadable_code: str = "",
) -> None:
    """Compare tensors of one kind, pairs of an expected and an actual one, whose hex digests are given.

    Expected tensors are read.
    """
    unreadable = Findings()
    expected_digests = hash_each([expected for expected, _ in pairs], progress, unreadable, code=unreadable_code)
    for (expected, tensor), wanted, digest in zip(pairs, expected_digests, digests, strict=True):
        if None not in (wanted, digest) and wanted != digest:
            problem = f"expected {PREFIX}{wanted} ({expected.file}), found {PREFIX}{digest}"
            findings.add(tensor.place, problem, code=code)
    findings.extend(unreadable)


def compare_with_source(
    source: Mapping[str, TensorAt],
    digests: Mapping[TensorAt, str | None],
    ties: Sequence[TieGroup],
    progress: ByteCounter,
    findings: Findings,
) -> None:
    """Compare stored tensors, with the hex digests of their bytes, with those of a source, which are read.

    A name that the source does not store is compared with a tensor that it is tied to.
    """
    pairs: list[tuple[TensorAt, TensorAt]] = []
    for tensor, digest in digests.items():
        origin = next((source[fqn] for fqn in _tied_names(tensor.name, ties) if fqn in source), None)
        if origin is None:
            findings.add(tensor.place, "the source has no such tensor")
        elif not are_of_one_kind(origin, tensor):
            findings.add(tensor.place, other_kind(origin, tensor))
        elif digest is not None:
            pairs.append((origin, tensor))
    compare_bytes(pairs, [digests[tensor] for _, tensor in pairs], progress, findings)


def report_missing(
    stored: Collection[str], expected: Iterable[TensorAt], ties: Sequence[TieGroup], findings: Findings
) -> None:
    """Report the tensors of a source that are stored under none of their names."""
    for tensor in expected:
        if not any(fqn in stored for fqn in _tied_names(tensor.name, ties)):
            findings.add(tensor.place, "is in no bundle")


def compare_checkpoints(
    tensors: Mapping[str, TensorAt],
    other: Mapping[str, TensorAt],
    location: str,
    findings: Findings,
    progress: ByteCounter,
    *,
    reads_bytes: bool,
) -> None:
    """Report tensors that only one of two checkpoints has, or that differ; `location` is the other's."""
    comparison = compare(other, tensors, are_of_one_kind)
    for names, problem in ((comparison.missing, "missing here"), (comparison.unexpected, f"not in {location}")):
        if names:
            sentence = f"{count_of(names, 'tensor')} {problem}: {some(names)}"
            hint = "the two are of different models or versions, or one is incomplete"
            findings.add(location, sentence, hint, names, code="check.other-names")
    for name in comparison.different:
        findings.add(tensors[name].place, other_kind(other[name], tensors[name]), code="check.other-kind")
    if not reads_bytes:
        return
    unequal = {*comparison.unexpected, *comparison.different}
    pairs = [(other[name], tensor) for name, tensor in tensors.items() if name not in unequal]
    unreadable = Findings()
    digests = hash_each([tensor for _, tensor in pairs], progress, unreadable, code="check.unreadable")
    compare_bytes(pairs, digests, progress, findings, code="check.other-bytes", unreadable_code="check.unreadable")
    findings.extend(unreadable)


def _tied_names(fqn: str, ties: Sequence[TieGroup]) -> Iterator[str]:
    yield fqn
    for group in ties:
        fqns = [member.fqn for member in group.members]
        if fqn in fqns:
            yield from fqns
