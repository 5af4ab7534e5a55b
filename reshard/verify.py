"""verify: proof that what is on disk is what the manifest says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from manifests.digest import PREFIX
from manifests.errors import InputError
from manifests.schema import Manifest
from manifests.store import find_manifest, open_shard, read_manifest, read_small_file
from reshard.checkpoint import TensorAt, tensors_in
from reshard.engine import hash_tensors
from reshard.formats.bundles import open_manifest
from stores.local import LocalFile

__all__ = ["VerifyReport", "verify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was read, and every difference found, as (where, problem)."""

    num_tensors: int
    nbytes: int
    differences: tuple[tuple[str, str], ...]


def verify(path: Path, progress: Callable[[int], object] = lambda nbytes: None) -> VerifyReport:
    """Read every shard and carried file of a manifest, and compare all digests.

    Damage is reported, not raised: one run names all of it.

    Raises:
        InputError: there is no readable manifest.
    """
    file = find_manifest(path)
    manifest = read_manifest(file)
    tensors, differences = _read_headers(manifest, file.parent)
    for tensor, found in zip(tensors, _hash_each(tensors, progress, differences), strict=True):
        if found is not None and found != tensor.digest:
            differences.append(
                (
                    f"{tensor.file}: {tensor.name!r}",
                    f"expected {PREFIX}{tensor.digest}, found {PREFIX}{found}",
                )
            )
    for carried in manifest.files:
        try:
            read_small_file(file.parent / carried.path, carried.digest)
        except InputError as error:
            differences.append((error.where, error.problem))
    if not differences:
        try:
            open_manifest(file)
        except InputError as error:  # whole bytes of an incomplete model
            differences.append((error.where, error.problem))
    return VerifyReport(
        num_tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        differences=tuple(differences),
    )


def _read_headers(manifest: Manifest, folder: Path) -> tuple[list[TensorAt], list[tuple[str, str]]]:
    tensors, differences = [], []
    for shard in manifest.shards:
        path = folder / shard.path
        try:
            header = open_shard(folder, shard)
            digests = header.digests(str(path))
        except InputError as error:
            differences.append((error.where, error.problem))
            continue
        tensors += tensors_in(LocalFile(path), header, digests)
    return tensors, differences


def _hash_each(
    tensors: list[TensorAt], progress: Callable[[int], object], differences: list[tuple[str, str]]
) -> list[str | None]:
    """Hash all tensors; where a file cannot be read to its end, say so and go on with the others."""
    try:
        return list(hash_tensors(tensors, progress))
    except (InputError, OSError):
        found: list[str | None] = []
        for tensor in tensors:
            try:
                found += hash_tensors([tensor])
            except (InputError, OSError) as error:
                differences.append((str(tensor.file), str(error)))
                found.append(None)
        return found
