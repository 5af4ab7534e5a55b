"""What is stored compared: tensors with those of a source or of another checkpoint, and a folder with its manifest.

Readers of Hugging Face folders load what the index lists, or files whose names they prefer to it, and never see the
manifest: so its index must say the same, and no file that it does not list may be there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from manifests.digest import PREFIX
from manifests.errors import InputError, refused_by_system
from manifests.index import (
    ADAPTER_NAMES,
    CONSULTED_FOLDERS,
    INDEX_NAME,
    has_index,
    is_consulted,
    is_indexed,
    is_weights,
    replicas_elsewhere,
)
from manifests.schema import WEIGHTS, Holds, Manifest, Stage, TieGroup
from reshard.copy.engine import hash_tensors
from reshard.copy.runs import ByteCounter
from reshard.formats.huggingface.weight_map import ShardIndex, read_shard_index
from reshard.formatting import count_of, some
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.comparison import Findings, are_of_one_kind, compare, other_kind
from stores.base import Folder, read_whole
from stores.bundles import TensorAt
from stores.folders.owned import files_in
from stores.local import LocalFolder


def tensors_of(checkpoint: Checkpoint, holds: Holds) -> Mapping[str, TensorAt] | None:
    """Return a checkpoint's weights or one kind of its optimizer state; None if it has none."""
    return checkpoint.tensors if holds == WEIGHTS else checkpoint.moments.get(holds)


def hash_each(
    tensors: Sequence[TensorAt], progress: ByteCounter, findings: Findings, *, code: str = ""
) -> Sequence[str | None]:
    """Hash all tensors; one that cannot be read is added to `findings` and gets None, and the others are read again."""
    try:
        return hash_tensors(tensors, progress)
    except (InputError, OSError) as error:
        if len(tensors) == 1:
            findings.add(tensors[0].file, str(error), code=code)
            return [None]
        halves = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]  # in threads, as far as they can be read
        return [digest for half in halves for digest in hash_each(half, lambda nbytes: None, findings, code=code)]


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
    stored: Collection[str],
    expected: Iterable[TensorAt],
    source: Mapping[str, TensorAt],
    ties: Sequence[TieGroup],
    progress: ByteCounter,
    findings: Findings,
) -> None:
    """Report the tensors of a source that are stored under none of their names, or differ from one that they are tied
    to and stored as."""
    compared = {fqn: source[fqn] for fqn in stored if fqn in source}
    copies: list[TensorAt] = []
    for tensor in expected:
        names = set(_tied_names(tensor.name, ties))
        if names.isdisjoint(stored):
            findings.add(tensor.place, "is in no bundle")
        elif tensor.name not in stored and not names.isdisjoint(compared):
            copies.append(tensor)
    digests = dict(zip(copies, hash_each(copies, progress, findings), strict=True))
    compare_with_source(compared, digests, ties, progress, findings)


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
    missing, unexpected = _apart(comparison.missing, other, tensors), _apart(comparison.unexpected, tensors, other)
    for names, problem in ((missing, "missing here"), (unexpected, f"not in {location}")):
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


def _apart(names: Iterable[str], tensors: Mapping[str, TensorAt], other: Mapping[str, TensorAt]) -> list[str]:
    """Return the names that are not a second one of bytes that both checkpoints have, as a tied weight's may be."""
    common = {(tensor.file, tensor.begin, tensor.nbytes) for name, tensor in tensors.items() if name in other}
    return [name for name in names if (tensors[name].file, tensors[name].begin, tensors[name].nbytes) not in common]


def _tied_names(fqn: str, ties: Sequence[TieGroup]) -> Iterator[str]:
    yield fqn
    for group in ties:
        fqns = [member.fqn for member in group.members]
        if fqn in fqns:
            yield from fqns


def read_index(manifest: Manifest, folder: Folder, findings: Findings) -> ShardIndex | None:
    """Return the index beside a manifest, if there is one that can be read."""
    if not has_index(manifest):
        return None
    try:  # a bucket looks the file up
        file = folder.file(INDEX_NAME)
        return read_shard_index(read_whole(file), str(file))
    except InputError as error:
        findings.add(error.where, error.problem)
        return None


def check_index(
    index: ShardIndex,
    manifest: Manifest,
    folder: Folder,
    stages: Collection[Stage],
    weights: Iterable[TensorAt],
    findings: Findings,
) -> None:
    """Report where an index differs from the shards of these stages, which have these `weights`."""
    where, is_all = str(folder.file(INDEX_NAME)), len(stages) == len(manifest.stages)
    indexed = [shard.path for stage in stages for shard in stage.shards if is_indexed(shard.holds, shard.path)]
    paths, replicas = {folder.file(path): path for path in indexed}, replicas_elsewhere(manifest.ties)
    stored = [(tensor, paths.get(tensor.file)) for tensor in weights]
    total = sum(tensor.nbytes for tensor, path in stored if path is not None)
    listed = index.weight_map
    comparison = compare(listed, {tensor.name: path for tensor, path in stored if tensor.name not in replicas})
    missing = [name for name in comparison.missing if is_all or listed[name] in indexed]
    counts = Counter(tensor.name for tensor, path in stored if path is not None and tensor.name not in replicas)
    repeated = [name for name, count in counts.items() if count > 1]
    for names, problem in (
        (comparison.unexpected, "the manifest's shards have {}, which the index does not list"),
        (comparison.different, "the index lists {} in another shard than the manifest's"),
        (missing, "the index lists {}, which the manifest's shards do not have"),
        (repeated, "the manifest's shards have {} more than once"),
    ):
        if names:
            sentence = problem.format(f"{count_of(names, 'tensor')} ({some(names)})")
            findings.add(f"{where}: weight_map", sentence)
    if is_all and (index.total_size != total or isinstance(index.total_size, bool)):
        problem = f"expected {total} (its tensors), found {str(index.total_size)[:80]}"
        findings.add(f"{where}: metadata.total_size", problem)


def check_names(manifest: Manifest, folder: Folder, manifest_name: str, findings: Findings) -> None:
    """Report files for which other programs read something else than the weights of a manifest.

    They are not listed, or listed as something else than readers take them for: see Note [Names that readers consult].
    """
    listed = {*files_in(manifest), manifest_name}
    for name in _names(folder):
        if is_consulted(name) and name not in listed and _is_file(folder, name):
            problem = "is not in the manifest, and programs that open the folder may read it: move it out of the folder"
            findings.add(f"{folder}/{name}", problem, code="manifest.unlisted-file")
    in_root = [shard for shard in manifest.shards if "/" not in shard.path]
    for shard in in_root:
        if shard.holds != WEIGHTS or (shard.path == "model.safetensors" and len(in_root) > 1):
            problem = f"has {shard.holds} of a stage, and readers take a file of this name for the weights of the model"
            findings.add(f"{folder}/{shard.path}", problem, code="manifest.misleading-name")
    for file in manifest.files:
        if is_weights(file.path) or file.path in ADAPTER_NAMES:
            problem = "is not a shard of the manifest, and readers take a file of this name for weights"
            findings.add(f"{folder}/{file.path}", problem, code="manifest.misleading-name")


def _names(folder: Folder) -> Iterable[str]:
    if not isinstance(folder, LocalFolder):
        return folder.names()
    names = _entries(folder, "")
    for name in CONSULTED_FOLDERS:
        entries = _entries(folder, f"{name}/")
        names += entries
        for entry in entries:  # such as presharded/tp2/ and adapters/retrieval/
            names += _entries(folder, f"{entry}/")
    return names


def _entries(folder: LocalFolder, below: str) -> list[str]:
    try:
        return sorted(below + entry for entry in os.listdir(folder.path / below))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise refused_by_system(str(folder.path / below), error, code="store.unreadable") from error


def _is_file(folder: Folder, name: str) -> bool:
    """Return whether a reader could open a file: a link to one, and no folder, pipe or dangling link."""
    return not isinstance(folder, LocalFolder) or os.path.isfile(folder.path / name)
