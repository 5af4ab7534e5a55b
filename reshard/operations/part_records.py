"""The records of a pack in parts, in `.NAME.parts`, and whether the folder beside them has what they say.

# Note [Records and the folder that they are about]
A record says that bytes are in a folder beside it, which may be removed, or emptied by another command, while the
record stays. So the plan has an id: records are in a folder of that name, and the folder with the bytes has a mark,
`.parts-ID`. Without the mark, nothing is written there, and nothing committed. It is removed right before the folder
becomes the output; from then on, commit.json identifies the folder (see Note [A commit that was killed]).
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from manifests.digest import digest_bytes
from manifests.errors import OutputError
from manifests.invariants import MANIFEST_NAME
from manifests.jsontext import parse_json_object
from manifests.store import read_small_file, write_file
from reshard.operations.pack import PLAN_NAME, records_folder
from reshard.plans.pack_plan import OutputShard
from reshard.plans.partition import Part

__all__ = [
    "COMMIT_NAME",
    "begin_part",
    "check_mark",
    "forget_lost",
    "identify",
    "is_identified",
    "mark_of",
    "read_record",
    "remove_records",
    "unfinished",
]

COMMIT_NAME = "commit.json"  # identifies the folder that is about to be renamed to the output


def begin_part(out: Path, folder: Path, key: str, part: Part) -> Path:
    """Return the folder of the records; the first part writes beside it the plan that all others must have."""
    beside = records_folder(out)
    if is_identified(out, out, beside) or is_identified(folder, out, beside):
        problem, hint = "a commit was killed before it had finished", f"run reshard commit {out}"
        raise OutputError(str(out), problem, hint, code="output.unfinished-commit")
    if not beside.exists() and any(folder.iterdir()):
        problem = "an interrupted pack without --part was writing here"
        hint = f"resume it by running its command again, or remove {folder}"
        raise OutputError(str(out), problem, hint, code="output.not-parts")
    beside.mkdir(exist_ok=True)
    if not (beside / PLAN_NAME).exists():
        _propose(beside, folder, {"plan": key, "of": part.of, "command": list(part.command)})
    plan = read_record(beside / PLAN_NAME)
    if plan["plan"] != key:
        raise OutputError(
            str(out),
            "other parts here have another plan: their source, layout, number of parts or reshard version differs, or "
            "the source was changed",
            f"run all parts with the same arguments, or remove {folder} and {beside}",
            code="output.other-plan",
        )
    records = beside / str(plan["id"])
    records.mkdir(exist_ok=True)
    check_mark(folder, records)
    return records


def _propose(beside: Path, folder: Path, plan: Mapping[str, object]) -> None:
    """Mark the folder and write the plan, unless another process is faster."""
    name = uuid.uuid4().hex
    draft, mark = beside / f".{name}", mark_of(folder, beside / name)
    write_file(mark, b"")
    write_file(draft, json.dumps({**plan, "id": name}).encode())
    try:
        os.link(draft, beside / PLAN_NAME)
    except FileExistsError:
        mark.unlink()
    draft.unlink()


def unfinished(records: Path, parts: Sequence[Part]) -> list[Part]:
    """Return the parts without a record; none if they are committed."""
    try:
        names = set(os.listdir(records))
    except FileNotFoundError:
        return []
    is_planned = (records.parent / PLAN_NAME).exists()  # looked at last: a commit removes it first
    return [part for part in parts if f"{part.name}.json" not in names] if is_planned else []


def mark_of(folder: Path, records: Path) -> Path:
    """Return the file by which a folder has what the records say: Note [Records and the folder that they are about]."""
    return folder / f".parts-{records.name}"


def check_mark(folder: Path, records: Path) -> None:
    if not mark_of(folder, records).is_file():
        problem = "what the parts wrote is not there any more"
        hint = f"remove {folder} and {records.parent}, and run the parts again"
        raise OutputError(str(folder), problem, hint, code="output.damaged-parts")


def forget_lost(records: Path, folder: Path, shards: Sequence[OutputShard]) -> None:
    """Remove the records of finished parts that wrote to one of these shards, if the shard was removed or cut since.

    It is about to get its length again. Then only a record could say which of its bytes were written.
    """
    finished = sorted(records.glob("part-*.json"))  # before the shards are looked at: theirs have their lengths
    lost = {shard.path for shard in shards if not _is_whole(folder / shard.path, shard.nbytes)} if finished else set()
    for record in finished if lost else ():
        with suppress(FileNotFoundError):  # another process has found it, too
            if not lost.isdisjoint(read_record(record)["digests"]):
                record.unlink()


def _is_whole(path: Path, nbytes: int) -> bool:
    return path.is_file() and path.stat().st_size == nbytes


def is_identified(folder: Path, out: Path, beside: Path) -> bool:
    """Whether a killed commit had completed this folder, and renamed it if it is `out`; see the note of `commit`."""
    commit_file = beside / COMMIT_NAME
    return commit_file.is_file() and identify(folder, out) == read_record(commit_file)


def identify(folder: Path, out: Path) -> dict[str, Any]:
    """Identify a folder with a manifest regardless of its path."""
    if not (folder / MANIFEST_NAME).is_file():
        return {}
    return {
        "inode": folder.stat().st_ino,
        "manifest": digest_bytes(read_small_file(folder / MANIFEST_NAME)),
    }


def remove_records(beside: Path) -> None:
    """Remove the plan first, for parts that still look for unfinished ones; commit.json last: a rerun needs it."""
    (beside / PLAN_NAME).unlink(missing_ok=True)
    for path in beside.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != COMMIT_NAME:
            path.unlink(missing_ok=True)
    shutil.rmtree(beside, ignore_errors=True)


def read_record(path: Path) -> dict[str, Any]:
    return parse_json_object(read_small_file(path), str(path))
