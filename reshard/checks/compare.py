"""Stored tensors compared with those of a source: which differ, which are missing, which are unexpected."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from manifests.digest import PREFIX
from manifests.errors import InputError
from manifests.schema import TieGroup
from reshard.copy.engine import hash_tensors
from reshard.copy.runs import ByteCounter
from reshard.tensors.comparison import are_of_one_kind, other_kind
from stores.bundles import TensorAt

_BATCH = 1 << 14
_Item = TypeVar("_Item")


class Difference(NamedTuple):
    """A difference: where it is (a file, or a tensor in one), what it is, and a code of its own if it has one."""

    where: str
    problem: str
    code: str = ""


def in_batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Yield items some at a time: enough to read them together, and not a million."""
    left = iter(items)
    while batch := list(islice(left, _BATCH)):
        yield batch


def hash_each(
    tensors: Sequence[TensorAt], progress: ByteCounter, differences: list[Difference]
) -> Sequence[str | None]:
    """Hash all tensors; one that cannot be read is added to `differences` and gets None."""
    try:
        return hash_tensors(tensors, progress)
    except (InputError, OSError):
        found: list[str | None] = []
        for tensor in tensors:
            try:
                found += hash_tensors([tensor])
            except (InputError, OSError) as error:
                differences.append(Difference(str(tensor.file), str(error)))
                found.append(None)
        return found


def differences_from(
    source: Mapping[str, TensorAt],
    stored: Mapping[TensorAt, str | None],
    ties: Sequence[TieGroup],
    progress: ByteCounter,
) -> list[Difference]:
    """Compare tensors, given with the hex digests of their bytes, with those of a source, which are read.

    A name that the source does not store is compared with a tensor that it is tied to.
    """
    differences: list[Difference] = []
    pairs: list[tuple[TensorAt, TensorAt]] = []
    for tensor, digest in stored.items():
        origin = next((source[fqn] for fqn in _names(tensor.name, ties) if fqn in source), None)
        if origin is None:
            differences.append(Difference(f"{tensor.file}: {tensor.name!r}", "the source has no such tensor"))
        elif not are_of_one_kind(origin, tensor):
            differences.append(Difference(f"{tensor.file}: {tensor.name!r}", other_kind(origin, tensor)))
        elif digest is not None:
            pairs.append((origin, tensor))
    differences += other_bytes(pairs, [stored[tensor] for _, tensor in pairs], progress, differences)
    return differences


def other_bytes(
    pairs: Sequence[tuple[TensorAt, TensorAt]],
    digests: Sequence[str | None],
    progress: ByteCounter,
    unreadable: list[Difference],
) -> list[Difference]:
    """Compare tensors of one kind, pairs of which is expected and which is there, whose hex digests are given.

    Expected tensors are read; those that cannot be are added to `unreadable`.
    """
    expected = hash_each([origin for origin, _ in pairs], progress, unreadable)
    return [
        Difference(
            f"{tensor.file}: {tensor.name!r}", f"expected {PREFIX}{wanted} ({origin.file}), found {PREFIX}{digest}"
        )
        for (origin, tensor), wanted, digest in zip(pairs, expected, digests, strict=True)
        if None not in (wanted, digest) and wanted != digest
    ]


def missing_from(stored: Collection[str], wanted: Iterable[TensorAt], ties: Sequence[TieGroup]) -> list[Difference]:
    """Name the tensors of a source that are stored under none of their names."""
    return [
        Difference(f"{tensor.file}: {tensor.name!r}", "is in no bundle")
        for tensor in wanted
        if not any(fqn in stored for fqn in _names(tensor.name, ties))
    ]


def _names(fqn: str, ties: Sequence[TieGroup]) -> Iterator[str]:
    yield fqn
    for group in ties:
        fqns = [member.fqn for member in group.members]
        if fqn in fqns:
            yield from fqns
