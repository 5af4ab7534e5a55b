"""Index against files: which safetensors files a folder needs, has, and has too many, and what is in each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from manifests.errors import UserError
from manifests.jsontext import parse_json_object
from manifests.paths import problem_with_path
from reshard.checks.finding import Contents, Finding, Report, count_of, finding_of, some
from reshard.sources.huggingface import OTHER_WEIGHTS, is_beside
from reshard.sources.weight_map import read_weight_map
from reshard.tensors.checkpoint import TensorAt, tensors_in
from reshard.tensors.source_index import INDEX_NAME, SUFFIX
from stores.base import Folder, read_file_header, read_whole

__all__ = ["Weights", "read_weights"]

_NUMBERED = re.compile(r"(.*-)(\d{5,})-of-(\d{5,})(\.safetensors)")
_MAX_HEADER_NBYTES = 25_000_000  # huggingface_hub and huggingface.js read no longer ones


@dataclass(kw_only=True, slots=True)
class Weights:
    """What a folder's safetensors files contain: each tensor under its stored name, the first of several alike.

    `is_whole`: every file could be read, so what is not in `tensors` is not there.
    """

    tensors: dict[str, TensorAt] = field(default_factory=dict)
    num_files: int = 0
    is_whole: bool = True

    @property
    def contents(self) -> Contents:
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        return Contents(num_tensors=len(self.tensors), num_files=self.num_files, nbytes=nbytes, tensors=self.tensors)


def read_weights(folder: Folder, report: Report) -> Weights:
    """Read the index and the header of every shard; report what disagrees."""
    files = folder.names()
    found = [name for name in files if name.endswith(SUFFIX)]
    weights = Weights()
    if INDEX_NAME in files:
        weight_map = _read_index(folder, report)
        if weight_map is None:
            weights.is_whole = False
            names = [name for name in found if not is_beside(name)]
        else:
            names = _names_in(folder, weight_map, found, report)
            weights.is_whole = names == sorted(set(weight_map.values()))
    else:
        weight_map, names = None, [name for name in found if not is_beside(name)]
        _report_no_index(folder, names, files, report)
    headers: dict[str, list[str]] = {}
    for name in names:
        headers[name] = _read_shard(folder, name, weights, report)
    if weight_map is not None:
        _compare(folder, weight_map, headers, report)
        _report_stray(folder, weight_map, [name for name in found if name not in names], report)
    return weights


def _read_index(folder: Folder, report: Report) -> Mapping[str, str] | None:
    file = folder.file(INDEX_NAME)
    try:
        raw = read_whole(file)
        weight_map = read_weight_map(raw, str(file), {})
    except UserError as error:
        report(finding_of(error))
        return None
    if b'"metadata"' not in raw or "metadata" not in parse_json_object(raw, str(file)):
        report(
            Finding(
                code="check.index-metadata",
                where=str(file),
                problem="has no metadata, and transformers reads it of every index",
                hint='add "metadata": {"total_size": BYTES}, or save the model again',
            )
        )
    for name in sorted(set(weight_map.values())):
        problem = problem_with_path(name)
        if problem is None and not name.endswith(SUFFIX):
            problem = f"expected the name of a {SUFFIX} file"
        if problem is not None:
            where = f"{file}: weight_map"
            report(Finding(code="source.bad-index", where=where, problem=f"{problem}, found {name[:80]!r}"))
            return None
    return weight_map


def _names_in(folder: Folder, weight_map: Mapping[str, str], found: list[str], report: Report) -> list[str]:
    """Return the shards of the index that are there; report those that are not, and gaps in their numbers."""
    wanted = set(weight_map.values())
    where = str(folder.file(INDEX_NAME))
    for name in sorted(wanted - set(found)):
        lost = tuple(sorted(fqn for fqn, shard in weight_map.items() if shard == name))
        report(
            Finding(
                code="check.missing-shard",
                where=f"{where}: weight_map",
                problem=f"{name!r} is not in the folder; without it {count_of(lost, 'tensor')} missing: {some(lost)}",
                hint="download or copy the missing shard",
                names=lost,
            )
        )
    _report_gaps(where, wanted, report)
    return sorted(name for name in wanted if name in set(found))


def _report_gaps(where: str, names: Iterable[str], report: Report) -> None:
    """Report numbers that are missing among `model-00001-of-00048.safetensors` and the like."""
    groups: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            groups.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (prefix, of), numbers in sorted(groups.items()):
        missing = sorted(set(range(1, int(of) + 1)) - numbers) if int(of) <= 1_000_000 else []
        if missing and len(missing) < int(of):
            lost = tuple(f"{prefix}{number:05}-of-{of}{SUFFIX}" for number in missing)
            report(
                Finding(
                    code="check.missing-numbers",
                    where=where,
                    problem=f"expected {int(of)} shards by their names, found {len(numbers)}; missing: {some(lost)}",
                    hint="download or copy what is missing; if the others are all there is, rename them",
                    names=lost,
                )
            )


def _report_no_index(folder: Folder, names: list[str], files: tuple[str, ...], report: Report) -> None:
    if not names:
        others = [name for name in files if name.endswith(OTHER_WEIGHTS)]
        hint = f"{others[0]} is in a format that is not checked" if others else "is this the folder of a model?"
        problem = "expected safetensors weights, found none"
        report(Finding(code="check.no-weights", where=str(folder), problem=problem, hint=hint))
    if len(names) > 1:
        report(
            Finding(
                code="check.no-index",
                where=str(folder),
                problem=f"{len(names)} shards and no {INDEX_NAME}: whether all are there is not known",
                hint="download the index, or save the model again",
                names=tuple(names),
            )
        )
    _report_gaps(str(folder), names, report)


def _read_shard(folder: Folder, name: str, weights: Weights, report: Report) -> list[str]:
    """Add a shard's tensors to `weights`; return their names."""
    file = folder.file(name)
    weights.num_files += 1
    try:
        header = read_file_header(file)
    except UserError as error:
        report(finding_of(error))
        weights.is_whole = False
        return []
    if header.nbytes > _MAX_HEADER_NBYTES:
        report(
            Finding(
                code="check.long-header",
                where=str(file),
                problem=f"expected a header of at most {_MAX_HEADER_NBYTES} bytes, found {header.nbytes}",
                hint="huggingface_hub cannot read it: split the shard into several",
            )
        )
    tensors = tensors_in(file, header)
    for tensor in tensors:
        first = weights.tensors.setdefault(tensor.name, tensor)
        if first is not tensor:
            report(
                Finding(
                    code="check.tensor-twice",
                    where=f"{file}: {tensor.name!r}",
                    problem=f"is also in {first.file}; which of them is read depends on the reader",
                    hint="remove one of the two",
                )
            )
    return [tensor.name for tensor in tensors]


def _compare(folder: Folder, weight_map: Mapping[str, str], headers: Mapping[str, list[str]], report: Report) -> None:
    """Report tensors that are not where the index says, in both directions."""
    where, present = str(folder.file(INDEX_NAME)), {name: set(tensors) for name, tensors in headers.items()}
    for shard, tensors in sorted(headers.items()):
        if not tensors:
            continue  # an empty or unreadable file is reported for itself
        if unlisted := [fqn for fqn in tensors if fqn not in weight_map]:
            report(
                Finding(
                    code="check.unindexed-tensor",
                    where=str(folder.file(shard)),
                    problem=f"{INDEX_NAME} lacks {count_of(unlisted, 'tensor')} of it: {some(unlisted)}",
                    hint="index and shards are of different versions; download both again",
                    names=tuple(unlisted),
                )
            )
        elsewhere = [fqn for fqn in tensors if weight_map.get(fqn, shard) != shard]
        if elsewhere:
            report(
                Finding(
                    code="check.wrong-shard",
                    where=str(folder.file(shard)),
                    problem=f"{INDEX_NAME} says that other shards have these tensors of it: {some(elsewhere)}",
                    hint="index and shards are of different versions; download both again",
                    names=tuple(elsewhere),
                )
            )
    absent: dict[str, list[str]] = {}
    for fqn, shard in weight_map.items():
        if shard in present and present[shard] and fqn not in present[shard]:
            absent.setdefault(shard, []).append(fqn)
    for shard, names in sorted(absent.items()):
        report(
            Finding(
                code="check.absent-tensor",
                where=f"{where}: weight_map",
                problem=f"{shard} lacks {count_of(names, 'tensor')} that the index puts there: {some(names)}",
                hint="index and shards are of different versions; download both again",
                names=tuple(names),
            )
        )


def _report_stray(folder: Folder, weight_map: Mapping[str, str], others: list[str], report: Report) -> None:
    for name in others:
        if is_beside(name):
            continue
        file = folder.file(name)
        try:
            tensors = [entry.name for entry in read_file_header(file).tensors]
        except UserError as error:
            report(finding_of(error))
            continue
        same = [fqn for fqn in tensors if fqn in weight_map]
        if same:
            problem = f"is not in {INDEX_NAME}, and has {count_of(same, 'tensor')} of it: {some(same)}"
            hint = "readers that read every file may take these for the model's: move it out of the folder"
            report(Finding(code="check.override", where=str(file), problem=problem, hint=hint, names=tuple(same)))
        else:
            problem = f"is not in {INDEX_NAME}; it has {count_of(tensors, 'tensor')}: {some(tensors)}"
            hint = "move it out of the folder, or download the index that belongs to it"
            report(Finding(code="check.stray-shard", where=str(file), problem=problem, hint=hint, names=tuple(tensors)))
