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
    alike: list[tuple[TensorAt, str, TensorAt]] = []
    for tensor, digest in stored.items():
        where = f"{tensor.file}: {tensor.name!r}"
        origin = next((source[fqn] for fqn in _names(tensor.name, ties) if fqn in source), None)
        if origin is None:
            differences.append(Difference(where, "the source has no such tensor"))
        elif (origin.dtype, origin.shape) != (tensor.dtype, tensor.shape):
            problem = f"expected {_kind(origin)} ({origin.file}), found {_kind(tensor)}"
            differences.append(Difference(where, problem))
        elif digest is not None:
            alike.append((tensor, digest, origin))
    expected = hash_each([origin for _, _, origin in alike], progress, differences)
    for (tensor, digest, origin), wanted in zip(alike, expected, strict=True):
        if wanted is not None and wanted != digest:
            problem = f"expected {PREFIX}{wanted} ({origin.file}), found {PREFIX}{digest}"
            differences.append(Difference(f"{tensor.file}: {tensor.name!r}", problem))
    return differences


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


def _kind(tensor: TensorAt) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
