"""check: everything that is wrong with a checkpoint of any kind, ours or not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from manifests.digest import PREFIX
from manifests.errors import (
    InputError,
    OutputError,
    Parameter,
    SourceError,
    UnreachableError,
    UsageError,
    UserError,
    check_choice,
)
from manifests.index import DIGESTS_NAME
from manifests.jsontext import parse_json_object
from manifests.store import write_file
from reshard.checks.compare import compare_checkpoints
from reshard.checks.verify import check_packed
from reshard.copy.runs import ByteCounter, Progress, counting
from reshard.formats.open import find_format, read_model_file
from reshard.formats.table import HUGGINGFACE, MANIFEST, CheckOptions
from reshard.tensors.comparison import Contents, Finding, Findings, compare
from reshard.transforms.arithmetic import FLOATS, count_not_finite
from stores.base import Blocks, Folder, is_hidden, read_whole
from stores.bundles import TensorAt
from stores.folders.probe import check_new_file
from stores.local import LocalFolder

_DIGESTS_VERSION = 1
DigestsAction = Literal["write", "verify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What was looked at, and what is wrong with it.

    Units: `nbytes` is what tensors take, `read_nbytes` what was read of files beyond their headers, in bytes.
    """

    location: str
    kind: str
    num_tensors: int
    num_files: int
    nbytes: int
    read_nbytes: int
    findings: tuple[Finding, ...]
    wrote_digests: bool = False

    @property
    def ok(self) -> bool:
        return not self.findings


def check(
    checkpoint: str | Path,
    *,
    against: str | Path | None = None,
    model: str | Path | None = None,
    reads_bytes: bool = False,
    values: bool = False,
    digests: DigestsAction | None = None,
    progress: Progress | None = None,
) -> CheckResult:
    """Check a checkpoint of any kind: index against files, headers, config against tensors, tokenizer.

    `checkpoint` is a Hugging Face folder, a hub repository, a bucket, a packed folder, or a folder of
    torch.distributed.checkpoint, of which the metadata is checked. `against` compares names, shapes and dtypes with
    another checkpoint, and with `reads_bytes` every byte. `values` reads all floating-point tensors and reports NaN,
    infinity and matrices of zeros. `digests` writes `digests.json` beside a local checkpoint in which no problem was
    found, or verifies every file against it. `model` is that of `plan`. Problems are reported in `findings`, not
    raised. Imports no torch.

    Units: bytes; progress is called with bytes read and 0, as the total is not known before.
    Raises:
        InputError: there is nothing there, or nothing to compare with.
        UsageError: `reads_bytes` without `against`, another value of `digests`, or a `model` of a manifest.
        ModelError: `model` is not valid.

    Example:
        >>> result = reshard.check("model")
        >>> result.ok, result.num_tensors, result.findings
        (True, 39, ())
    """
    if reads_bytes and against is None:
        problem = "compares with another checkpoint"
        hint = f"name it with {Parameter('against')}, or use {Parameter('digests', 'verify')}"
        raise UsageError(Parameter("reads_bytes"), problem, hint, code="options.conflict")
    if digests is not None:
        check_choice(Parameter("digests"), digests, get_args(DigestsAction))
    description = None if model is None else read_model_file(Path(model))
    address, counter = str(checkpoint), counting(progress, 0)
    kind, folder = find_format(address)
    findings, read_nbytes = Findings(), 0

    def count(nbytes: int) -> None:
        nonlocal read_nbytes
        read_nbytes += nbytes
        counter(nbytes)

    if kind is HUGGINGFACE and not folder.names():  # in a bucket, any address that nothing begins with
        problem, hint = "contains no files", "check the address for typos"
        raise SourceError(str(folder), problem, hint, code="source.nothing-to-check")
    reads_tensors = values or against is not None
    if kind is not HUGGINGFACE and description is not None:
        problem = "is for Hugging Face folders; a manifest records its own description"
        raise UsageError(Parameter("model"), problem, "leave it out", code="options.model-of-manifest")
    if digests == "write":
        _digests_path(folder)
    contents = Contents()
    try:
        how = CheckOptions(reads_tensors=reads_tensors, description=description, progress=count)
        check_folder = check_packed if kind is MANIFEST else kind.check_folder
        contents = check_folder(folder, findings, how)
    except UnreachableError:
        raise
    except InputError as error:  # of the checkpoint, or nobody could have opened the folder
        findings.add_error(error)
    if values:
        state = set(contents.state)
        check_values((tensor for tensor in contents.tensors.values() if tensor not in state), findings, count)
        check_values(contents.state, findings, count, may_be_zero=True)
    if against is not None:
        other_kind, other_folder = find_format(str(against))
        here, both_stored = contents.tensors, kind.stored is not None and other_kind.stored is not None
        other = other_kind.read_stored(other_folder) if both_stored else other_kind.read_weights(other_folder)
        if kind.stored is not None and not both_stored and here:
            here = kind.read_weights(folder)
        compare_checkpoints(here, other, str(against), findings, count, reads_bytes=reads_bytes)
    if digests == "verify":
        _check_digests(folder, findings, count)
    wrote = digests == "write" and not findings
    if wrote:
        _write_digests(folder, count)
    return CheckResult(
        location=address,
        kind=kind.name,
        num_tensors=contents.num_tensors,
        num_files=contents.num_files,
        nbytes=contents.nbytes,
        read_nbytes=read_nbytes,
        findings=tuple(findings),
        wrote_digests=wrote,
    )


def check_values(
    tensors: Iterable[TensorAt], findings: Findings, progress: ByteCounter, *, may_be_zero: bool = False
) -> None:
    """Read floating-point tensors; report those that have NaN or infinity, and matrices of zeros alone.

    Vectors of zeros are common, such as biases that nobody trained, also stacked ones of experts, and so is the state
    of experts that got no token.
    """
    for tensor in tensors:
        if tensor.dtype not in FLOATS or not tensor.nbytes:
            continue
        try:
            num_broken, is_zero = count_not_finite(tensor, progress)
        except UserError as error:
            findings.add_error(error)
            continue
        if num_broken:
            count = f"{num_broken} value{'s' if num_broken > 1 else ''}"
            problem, hint = f"{count} of it NaN or infinite", "take an earlier checkpoint, or download it again"
            findings.add(tensor.place, problem, hint, code="check.not-finite")
        elif is_zero and len(tensor.shape) > 1 and not (may_be_zero or "bias" in tensor.name.rpartition(".")[2]):
            hint = "was it ever written? take an earlier checkpoint, or download it again"
            findings.add(tensor.place, "all values are zero", hint, code="check.all-zero")


def _digests_path(folder: Folder) -> Path:
    """Return where `_write_digests` will write, after checking that it can: every file is read before."""
    if not isinstance(folder, LocalFolder):
        hint = "copy it here first, or keep the digests of a local copy"
        raise OutputError(str(folder), "digests are written to folders only", hint, code="output.unwritable")
    path = Path(folder.location) / DIGESTS_NAME
    check_new_file(path, Parameter("digests", "write").where, force=True)
    return path


def _write_digests(folder: Folder, progress: ByteCounter) -> None:
    """Read every file and write its size and digest to `digests.json`."""
    path = _digests_path(folder)
    files = {name: _entry(folder, name, progress) for name in _hashed_names(folder)}
    document = {"version": _DIGESTS_VERSION, "files": files}
    write_file(path, json.dumps(document, indent=1).encode() + b"\n")


def _check_digests(folder: Folder, findings: Findings, progress: ByteCounter) -> None:
    """Read every file that `digests.json` names and report what differs."""
    expected, entries = _read_digests(folder), dict[str, dict[str, Any]]()
    unreadable = Findings()
    for name in _hashed_names(folder):
        try:
            entries[name] = _entry(folder, name, progress) if name in expected else {}
        except UserError as error:
            unreadable.add_error(error)
            entries[name] = expected[name]
    comparison = compare(expected, entries)
    for name in comparison.unexpected:
        hint = "remove it, or write the digests again"
        findings.add(folder.file(name), f"is not in {DIGESTS_NAME}", hint, code="check.unlisted-file")
    for name in comparison.different:
        problem = f"expected {_shown(expected[name])}, found {_shown(entries[name])}"
        hint = "the file was changed or damaged; download or copy it again"
        findings.add(folder.file(name), problem, hint, code="check.changed-file")
    findings.extend(unreadable)
    for name in sorted(comparison.missing):
        problem, hint = f"is missing; {DIGESTS_NAME} has it", "download or copy it again"
        findings.add(f"{folder}/{name}", problem, hint, code="check.absent-file")


def _hashed_names(folder: Folder) -> list[str]:
    return [name for name in folder.names() if name != DIGESTS_NAME and not is_hidden(name)]


def _entry(folder: Folder, name: str, progress: ByteCounter) -> dict[str, Any]:
    blocks = Blocks(folder.file(name))
    for block in blocks:
        progress(len(block))
    return {"nbytes": blocks.nbytes, "digest": blocks.digest}


def _shown(entry: dict[str, Any]) -> str:
    return f"{entry['nbytes']} bytes, {entry['digest']}"


def _read_digests(folder: Folder) -> dict[str, dict[str, Any]]:
    if DIGESTS_NAME not in folder.names():
        hint = f"write it with {Parameter('digests', 'write')} while the folder is known to be right"
        raise SourceError(f"{folder}/{DIGESTS_NAME}", "no such file", hint, code="source.no-digests")
    file = folder.file(DIGESTS_NAME)
    document = parse_json_object(read_whole(file), str(file))
    files, again = document.get("files"), f"write it again with {Parameter('digests', 'write')}"
    if document.get("version") != _DIGESTS_VERSION or not isinstance(files, dict):
        problem = f"expected version {_DIGESTS_VERSION} and files"
        raise SourceError(str(file), problem, again, code="source.bad-digests")
    for name, entry in files.items():
        if not _is_entry(entry):
            where = f"{file}: files[{name[:80]!r}]"
            raise SourceError(where, f"expected nbytes and a {PREFIX} digest", again, code="source.bad-digests")
    return {name: {"nbytes": entry["nbytes"], "digest": entry["digest"]} for name, entry in files.items()}


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("nbytes")) is int
        and isinstance(entry.get("digest"), str)
        and entry["digest"].startswith(PREFIX)
    )
