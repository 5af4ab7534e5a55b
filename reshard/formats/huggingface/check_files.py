"""Index against files: which weight files a folder needs, has, and has too many, and what is in each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from manifests.errors import UserError
from manifests.index import INDEX_NAME, MOST_READ_HEADER_NBYTES, OTHER_WEIGHTS
from manifests.paths import problem_with_path
from reshard.archives.tensors import read_archive
from reshard.formats.huggingface.read import is_beside
from reshard.formats.huggingface.weight_map import (
    SINGLE_NAME,
    TORCH_INDEX_NAME,
    TORCH_NAME,
    TORCH_SUFFIX,
    is_torch_shard,
    read_shard_index,
    refuse_ranks,
)
from reshard.formatting import count_of, find_missing, some
from reshard.tensors.comparison import Contents, Findings, compare
from reshard.tensors.source_index import SUFFIX
from stores.base import Folder, InputFile, read_file_header, read_whole
from stores.bundles import TensorAt, tensors_in

_NUMBERED = re.compile(r"(.*-)([0-9]{5,9})-of-([0-9]{5,9})(\.safetensors|\.bin)")


@dataclass(kw_only=True, slots=True)
class Weights:
    """What a folder's weight files contain: each tensor under its stored name, the first of several alike.

    `is_whole`: every file could be read, so what is not in `tensors` is not there.
    """

    tensors: dict[str, TensorAt] = field(default_factory=dict)
    num_files: int = 0
    is_whole: bool = True

    @property
    def contents(self) -> Contents:
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        return Contents(num_tensors=len(self.tensors), num_files=self.num_files, nbytes=nbytes, tensors=self.tensors)


@dataclass(frozen=True, slots=True)
class _Format:
    """A format of weight files: the names of its index and of a single file, those of shards, and their reader."""

    index_name: str
    single_name: str
    suffix: str
    is_shard: Callable[[str], bool]
    read: Callable[[InputFile], Sequence[TensorAt]]


_SAFETENSORS = _Format(
    INDEX_NAME,
    SINGLE_NAME,
    SUFFIX,
    lambda name: name.endswith(SUFFIX),
    lambda file: tensors_in(file, read_file_header(file)),
)
_TORCH = _Format(TORCH_INDEX_NAME, TORCH_NAME, TORCH_SUFFIX, is_torch_shard, read_archive)


def _format_of(files: Iterable[str]) -> _Format:
    """Return the format that transformers would read: safetensors, unless there are only files of torch.save."""
    names = set(files)
    has_torch = TORCH_INDEX_NAME in names or any(map(is_torch_shard, names))
    is_safe = INDEX_NAME in names or any(name.endswith(SUFFIX) and not is_beside(name) for name in names)
    return _TORCH if has_torch and not is_safe else _SAFETENSORS


def read_files(folder: Folder, findings: Findings) -> Weights:
    """Read the index and the table of tensors of every shard; report what disagrees."""
    try:
        refuse_ranks(folder)
    except UserError as error:
        findings.add_error(error)
        return Weights(is_whole=False)
    files = folder.names()
    kind = _format_of(files)
    shards = [name for name in files if kind.is_shard(name)]
    weights = Weights()
    if kind.index_name in files:
        weight_map = _read_index(folder, kind, findings)
        if weight_map is None:
            weights.is_whole = False
            names = [name for name in shards if not is_beside(name)]
        else:
            names = _names_in(folder, kind, weight_map, shards, findings)
            weights.is_whole = names == sorted(set(weight_map.values()))
    else:
        weight_map, names = None, [name for name in shards if not is_beside(name)]
        _report_no_index(folder, kind, names, files, findings)
    headers: dict[str, list[str]] = {}
    for name in names:
        headers[name] = _read_shard(folder, kind, name, weights, findings)
    if weight_map is not None:
        _compare(folder, kind, weight_map, headers, findings)
        _report_stray(folder, kind, weight_map, [name for name in shards if name not in names], findings)
    return weights


def _read_index(folder: Folder, kind: _Format, findings: Findings) -> Mapping[str, str] | None:
    file = folder.file(kind.index_name)
    try:
        index = read_shard_index(read_whole(file), str(file))
    except UserError as error:
        findings.add_error(error)
        return None
    if index.metadata is None:
        findings.add(
            file,
            "has no metadata, and transformers reads it of every index",
            'add "metadata": {"total_size": BYTES}, or save the model again',
            code="check.index-metadata",
        )
    for name in sorted(set(index.weight_map.values())):
        problem = problem_with_path(name)
        if problem is None and not name.endswith(kind.suffix):
            problem = f"expected the name of a {kind.suffix} file"
        if problem is not None:
            where = f"{file}: weight_map"
            findings.add(where, f"{problem}, found {name[:80]!r}", code="source.bad-index")
            return None
    return index.weight_map


def _names_in(
    folder: Folder, kind: _Format, weight_map: Mapping[str, str], shards: list[str], findings: Findings
) -> list[str]:
    """Return the shards of the index that are there; report those that are not, and gaps in their numbers."""
    wanted = set(weight_map.values())
    where, absent = str(folder.file(kind.index_name)), wanted.difference(shards)
    for name in sorted(absent):
        lost = sorted(fqn for fqn, shard in weight_map.items() if shard == name)
        findings.add(
            f"{where}: weight_map",
            f"{name!r} is not in the folder; without it {count_of(lost, 'tensor')} missing: {some(lost)}",
            "download or copy the missing shard",
            lost,
            code="check.missing-shard",
        )
    _report_gaps(where, wanted, findings)
    return sorted(wanted - absent)


def _report_gaps(where: str, names: Iterable[str], findings: Findings) -> None:
    """Report numbers that are missing among `model-00001-of-00048.safetensors` and the like."""
    groups: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            groups.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (prefix, of, suffix), numbers in sorted(groups.items()):
        count, missing = find_missing(numbers, range(1, int(of) + 1))
        if 0 < count < int(of):
            lost = tuple(f"{prefix}{number:05}-of-{of}{suffix}" for number in missing)
            findings.add(
                where,
                f"expected {int(of)} shards by their names, found {int(of) - count}; missing: {some(lost)}",
                "download or copy what is missing; if the others are all there is, rename them",
                lost,
                code="check.missing-numbers",
            )


def _report_no_index(
    folder: Folder, kind: _Format, names: list[str], files: tuple[str, ...], findings: Findings
) -> None:
    if not names:
        others = [name for name in files if name.endswith(OTHER_WEIGHTS)]
        hint = f"{others[0]} is in a format that is not checked" if others else "is this the folder of a model?"
        problem = "expected safetensors weights, found none"
        findings.add(folder, problem, hint, code="check.no-weights")
    elif len(names) == 1 and names[0] != kind.single_name:
        problem = f"without {kind.index_name}, transformers reads {kind.single_name} alone, and not this file"
        hint = f"rename it to {kind.single_name}, if it is the whole model; or download the index"
        findings.add(folder.file(names[0]), problem, hint, names, code="check.no-index")
    elif len(names) > 1:
        findings.add(
            folder,
            f"{len(names)} shards and no {kind.index_name}: whether all are there is not known",
            "download the index, or save the model again",
            names,
            code="check.no-index",
        )
    _report_gaps(str(folder), names, findings)


def _read_shard(folder: Folder, kind: _Format, name: str, weights: Weights, findings: Findings) -> list[str]:
    """Add a shard's tensors to `weights`; return their names."""
    file = folder.file(name)
    weights.num_files += 1
    try:
        tensors = kind.read(file)
    except UserError as error:
        findings.add_error(error)
        weights.is_whole = False
        return []
    header_nbytes = min((tensor.begin for tensor in tensors), default=0)
    if kind is _SAFETENSORS and header_nbytes > MOST_READ_HEADER_NBYTES:
        findings.add(
            file,
            f"expected a header of at most {MOST_READ_HEADER_NBYTES} bytes, found {header_nbytes}",
            "huggingface_hub cannot read it: split the shard into several",
            code="check.long-header",
        )
    for tensor in tensors:
        first = weights.tensors.setdefault(tensor.name, tensor)
        if first is not tensor:
            findings.add(
                f"{file}: {tensor.name!r}",
                f"is also in {first.file}; which of them is read depends on the reader",
                "remove one of the two",
                code="check.tensor-twice",
            )
    return [tensor.name for tensor in tensors]


def _compare(
    folder: Folder,
    kind: _Format,
    weight_map: Mapping[str, str],
    headers: Mapping[str, list[str]],
    findings: Findings,
) -> None:
    """Report tensors that are not where the index says, in both directions."""
    listed: dict[str, dict[str, None]] = {}
    for fqn, shard in weight_map.items():
        listed.setdefault(shard, {})[fqn] = None
    comparisons = {  # an empty or unreadable file is reported for itself
        shard: compare(listed.get(shard, {}), dict.fromkeys(tensors))
        for shard, tensors in sorted(headers.items())
        if tensors
    }
    hint = "index and shards are of different versions; download both again"
    for shard, comparison in comparisons.items():
        if unlisted := [fqn for fqn in comparison.unexpected if fqn not in weight_map]:
            problem = f"{kind.index_name} lacks {count_of(unlisted, 'tensor')} of it: {some(unlisted)}"
            findings.add(folder.file(shard), problem, hint, unlisted, code="check.unindexed-tensor")
        if elsewhere := [fqn for fqn in comparison.unexpected if fqn in weight_map]:
            problem = f"{kind.index_name} says that other shards have these tensors of it: {some(elsewhere)}"
            findings.add(folder.file(shard), problem, hint, elsewhere, code="check.wrong-shard")
    for shard, comparison in comparisons.items():
        if absent := comparison.missing:
            problem = f"{shard} lacks {count_of(absent, 'tensor')} that the index puts there: {some(absent)}"
            where = f"{folder.file(kind.index_name)}: weight_map"
            findings.add(where, problem, hint, absent, code="check.absent-tensor")


def _report_stray(
    folder: Folder, kind: _Format, weight_map: Mapping[str, str], others: list[str], findings: Findings
) -> None:
    for name in others:
        if is_beside(name):
            continue
        file = folder.file(name)
        try:
            tensors = [tensor.name for tensor in kind.read(file)]
        except UserError as error:
            findings.add_error(error)
            continue
        same = [fqn for fqn in tensors if fqn in weight_map]
        if same:
            problem = f"is not in {kind.index_name}, and has {count_of(same, 'tensor')} of it: {some(same)}"
            hint = "readers that read every file may take these for the model's: move it out of the folder"
            findings.add(file, problem, hint, same, code="check.override")
        else:
            problem = f"is not in {kind.index_name}; it has {count_of(tensors, 'tensor')}: {some(tensors)}"
            hint = "move it out of the folder, or download the index that belongs to it"
            findings.add(file, problem, hint, tensors, code="check.stray-shard")
