"""`digests.json`: the size and digest of every file of a folder, for checkpoints that have no manifest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manifests.digest import PREFIX
from manifests.errors import OutputError, Parameter, SourceError, UserError
from manifests.index import DIGESTS_NAME
from manifests.jsontext import parse_json_object
from manifests.store import write_file
from reshard.tensors.comparison import compare
from reshard.tensors.finding import Findings
from stores.base import Blocks, Folder, is_hidden, read_whole
from stores.folders.probe import check_new_file
from stores.local import LocalFolder

_VERSION = 1

OnBytes = Callable[[int], object]


def check_digests_place(folder: Folder) -> Path:
    """Return where `write_digests` will write, after checking that it can: every file is read before.

    Raises:
        OutputError: the folder is not on this machine, or cannot be written.
    """
    if not isinstance(folder, LocalFolder):
        hint = "copy it here first, or keep the digests of a local copy"
        raise OutputError(str(folder), "digests are written to folders only", hint, code="output.unwritable")
    path = Path(folder.location) / DIGESTS_NAME
    check_new_file(path, Parameter("digests", "write").where, force=True)
    return path


def write_digests(folder: Folder, progress: OnBytes) -> None:
    """Read every file and write its size and digest to `digests.json`.

    Raises:
        OutputError: as `check_digests_place`.
    """
    path = check_digests_place(folder)
    files = {name: _entry(folder, name, progress) for name in _names(folder)}
    document = {"version": _VERSION, "files": files}
    write_file(path, json.dumps(document, indent=1).encode() + b"\n")


def check_digests(folder: Folder, findings: Findings, progress: OnBytes) -> None:
    """Read every file that `digests.json` names and report what differs.

    Raises:
        SourceError: there is no `digests.json` that can be read.
    """
    expected, entries = _read(folder), dict[str, dict[str, Any]]()
    unreadable = Findings()
    for name in _names(folder):
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


def _names(folder: Folder) -> list[str]:
    return [name for name in folder.names() if name != DIGESTS_NAME and not is_hidden(name)]


def _entry(folder: Folder, name: str, progress: OnBytes) -> dict[str, Any]:
    blocks = Blocks(folder.file(name))
    for block in blocks:
        progress(len(block))
    return {"nbytes": blocks.nbytes, "digest": blocks.digest}


def _shown(entry: dict[str, Any]) -> str:
    return f"{entry['nbytes']} bytes, {entry['digest']}"


def _read(folder: Folder) -> dict[str, dict[str, Any]]:
    if DIGESTS_NAME not in folder.names():
        hint = f"write it with {Parameter('digests', 'write')} while the folder is known to be right"
        raise SourceError(f"{folder}/{DIGESTS_NAME}", "no such file", hint, code="source.no-digests")
    file = folder.file(DIGESTS_NAME)
    document = parse_json_object(read_whole(file), str(file))
    files, again = document.get("files"), f"write it again with {Parameter('digests', 'write')}"
    if document.get("version") != _VERSION or not isinstance(files, dict):
        problem = f"expected version {_VERSION} and files"
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
