"""Outputs in a folder that can be filled but not replaced: a mount point, or one whose parent is not writable.

# Note [Outputs in a mount point]
A volume or scratch disk is mounted on a folder that cannot be renamed, and files written beside it are on another
disk. So the output is written in a subfolder, `.reshard.partial`, and its entries move up when all are complete, the
manifest last: a folder without one is not a checkpoint. The names to move are recorded first, and the run after a
kill moves them back. An existing output is not replaced, since that cannot be done atomically.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from manifests.errors import OutputError
from manifests.jsontext import parse_json_object
from manifests.store import read_small_file, sync_folder, write_file

__all__ = ["WORK_NAME", "is_fixed", "is_free", "move_back", "move_up"]

WORK_NAME = ".reshard.partial"
_MOVING_NAME = ".moving"
_ALLOWED = (WORK_NAME, ".reshard.parts", "lost+found")  # may be in an "empty" folder
_MOUNTS = "/proc/self/mountinfo"


def is_fixed(out: Path) -> bool:
    """Return whether `out` is a folder that can be filled but not replaced."""
    if out.is_symlink() or not out.is_dir():
        return False
    return _is_mounted(out) or not os.access(Path(os.path.abspath(out)).parent, os.W_OK | os.X_OK)


def is_free(out: Path) -> bool:
    """Return whether `out` does not exist or is an empty folder."""
    if not os.path.lexists(out):
        return True
    if out.is_symlink() or not out.is_dir():
        return False
    names = set(os.listdir(out))
    if names and is_fixed(out):
        names.difference_update(_ALLOWED)
        *moving, last = _moving(out / WORK_NAME)
        if last not in names:
            names.difference_update(moving)
    return not names


def move_up(work: Path, out: Path, last: str, journal: str = "") -> None:
    """Commit an output: move everything in `work` but the `journal` to `out`, `last` (the manifest) at the end.

    Raises:
        OutputError: a file of that name has appeared in `out`.
        OSError: a rename failed.
    """
    names = sorted(set(os.listdir(work)) - {_MOVING_NAME, journal}, key=lambda name: (name == last, name))
    if taken := next((name for name in names if os.path.lexists(out / name)), None):
        raise OutputError(str(out / taken), "already exists", "choose another folder", code="output.exists")
    write_file(work / _MOVING_NAME, json.dumps({"names": names}).encode())
    for name in names:
        if name == names[-1]:
            sync_folder(out)
        os.rename(work / name, out / name)
    # Commit point: readers ignore a folder without manifest.json.
    sync_folder(out)
    for name in filter(None, (journal, _MOVING_NAME)):
        (work / name).unlink(missing_ok=True)
    work.rmdir()


def move_back(out: Path) -> None:
    """Undo a commit that was killed or failed, unless it had moved everything."""
    work = out / WORK_NAME
    if not work.is_dir() or work.is_symlink():
        return
    *moving, last = _moving(work)
    if not os.path.lexists(out / last):
        for name in moving:
            if os.path.lexists(out / name) and not os.path.lexists(work / name):
                os.rename(out / name, work / name)
        sync_folder(work)
    (work / _MOVING_NAME).unlink(missing_ok=True)


def _moving(work: Path) -> list[str]:
    """Return the names that a commit was moving, in order; without a commit, a name that does not exist."""
    path = work / _MOVING_NAME
    if not path.is_file():
        return [_MOVING_NAME]
    names = parse_json_object(read_small_file(path), str(path)).get("names")
    if not isinstance(names, list) or not all(
        isinstance(name, str) and os.path.basename(name) == name for name in names
    ):
        raise OutputError(str(path), "record of a commit is damaged", "remove it", code="output.damaged-record")
    return [str(name) for name in names] or [_MOVING_NAME]


def _is_mounted(folder: Path) -> bool:
    if os.path.ismount(folder):
        return True
    try:
        lines = Path(_MOUNTS).read_bytes().splitlines()  # a bind mount can be on its parent's file system
    except OSError:
        return False
    mounted = os.fsencode(os.path.realpath(folder))
    escaped = b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes((byte,)) for byte in mounted)
    return any(line.split(b" ")[4] == escaped for line in lines)
