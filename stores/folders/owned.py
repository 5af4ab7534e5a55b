"""Files of a folder that a command may replace or remove: those that it wrote.

# Note [Files of others in an output]
`--force` replaces a folder atomically, by exchanging two names, and only one that has nothing but files that we wrote.
This is checked before anything is written and right before the exchange; files that are added even later stay in the
folder that was replaced, which is not removed then.

# Note [Whose a folder under construction is]
Its name, `.NAME.partial`, does not show it. A record in it, written before any other file and removed last, names the
files that are written there; a complete output, or one that was replaced and is being removed, is known by its
manifest or the record of an export. A file that neither names belongs to somebody else, and the folder is refused.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from manifests.errors import InputError, OutputError, UnreachableError, refused_by_system
from manifests.index import DIGESTS_NAME, INDEX_NAME, SIGNATURE_NAME, has_index
from manifests.invariants import MANIFEST_NAME
from manifests.jsontext import parse_json_object
from manifests.paths import is_file
from manifests.schema import Manifest
from manifests.store import read_small_file, write_file
from stores.folders.lock import open_locked
from stores.open import open_manifest

# Returns the paths below a folder that may be removed; None: the folder was not written by this command.
FindOwned = Callable[[Path], Collection[str] | None]

logger = logging.getLogger(__name__)

RECORD_NAME = ".journal"
_NUM_SHOWN = 5
_RANDOM = re.compile(r"[0-9a-f]{32}")


def files_of_manifest(folder: Path) -> Collection[str] | None:
    """Return the paths that a checkpoint in a folder may have; None if no manifest can be read, see `owned_files`."""
    try:
        manifest = open_manifest(folder).manifest
    except UnreachableError:
        raise
    except InputError:
        return None
    return owned_files(manifest)


def owned_files(manifest: Manifest) -> frozenset[str]:
    """Return the paths of a checkpoint's files, and of its signature and the digests of `reshard check`."""
    return frozenset((*files_in(manifest), SIGNATURE_NAME, DIGESTS_NAME))


def files_in(manifest: Manifest) -> Iterator[str]:
    """Yield the paths of a checkpoint's files: shards, auxiliary files, the index and the manifest itself."""
    yield from (shard.path for shard in manifest.shards)
    yield from (file.path for file in manifest.files)
    if has_index(manifest):
        yield INDEX_NAME
    yield MANIFEST_NAME


def foreign_files(folder: Path, owned: Collection[str]) -> list[str]:
    """Return what is in a folder besides the `owned` files: files, links, and folders without `owned` files."""
    above = {parent for path in owned for parent in _parents(path)}
    foreign: set[str] = set()
    for path, is_folder in _walk(folder):
        if path not in (above if is_folder else owned) and foreign.isdisjoint(_parents(path)):
            foreign.add(path)
    return sorted(foreign)


def check_only_ours(out: Path, owned: Collection[str]) -> None:
    """Refuse to replace a folder with files of others: see Note [Files of others in an output]."""
    if names := foreign_files(out, owned):
        raise foreign_error(str(out), names)


def foreign_error(where: str, names: Sequence[str]) -> InputError:
    """Return the error about an output, in a folder or a bucket, that has these files of others."""
    problem = f"has files that this command did not write: {_first_of(names)}"
    hint = "move them elsewhere, or choose another output"
    return OutputError(where, problem, hint, code="output.foreign-file")


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more


def write_record(folder: Path, names: Collection[str]) -> None:
    """Record the files that are written in a folder under construction, or removed from one, as ours."""
    write_file(folder / RECORD_NAME, (json.dumps({"names": sorted(names)}) + "\n").encode())


def check_ours(folder: Path, find_owned: FindOwned, *, wanted: Collection[str] = ()) -> None:
    """Refuse files that we did not write: see Note [Whose a folder under construction is].

    Where there is a record, the `wanted` files are ours, too. Folders without files belong to nobody.
    """
    names = _recorded(folder / RECORD_NAME)
    written = () if names is None else (RECORD_NAME, *names, *wanted)
    owned = {f".{RECORD_NAME}.partial", *written, *(find_owned(folder) or ())}  # the record itself is written first
    others = [path for path, is_folder in _walk(folder) if not is_folder and path not in owned]
    bases = {path.rpartition("/")[2] for path in owned}
    if foreign := [path for path in others if names is None or not _is_temporary(path, bases)]:
        problem = "has the name of a folder under construction, and files that this command did not write: "
        hint = "move them elsewhere, or remove the folder"
        raise OutputError(str(folder), problem + _first_of(foreign), hint, code="output.foreign-partial")


def _recorded(path: Path) -> Collection[str] | None:
    """Return the names in a record, None if there is none."""
    if path.is_symlink() or not is_file(path):
        return None
    try:
        line = read_small_file(path).partition(b"\n")[0]
        names = parse_json_object(line, str(path)).get("names")
    except UnreachableError:
        raise
    except InputError:
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _is_temporary(path: str, names: Collection[str]) -> bool:
    """Whether a file is one that `write_file` renames to one of these names, from whichever process."""
    name = path.rpartition("/")[2]
    inner = name.removeprefix(".").removesuffix(".partial")
    return name == f".{inner}.partial" and (inner in names or bool(_RANDOM.fullmatch(inner)))


def remove_replaced(old: Path, owned: Collection[str]) -> None:
    """Remove the `owned` files of a replaced folder, then the folder if it is empty.

    The new folder is already in place: what cannot be removed is logged, and left to the next run, which knows it by
    the record. So that is removed last, and stays with any of them.
    """
    is_recorded, remains = RECORD_NAME in owned, False
    for path, is_folder in _walk(old):
        try:
            if is_folder:
                (old / path).chmod(0o700 | (old / path).stat().st_mode)
            elif path in owned and path != RECORD_NAME:
                (old / path).unlink()
        except OSError:
            remains = True
    if is_recorded and not remains:
        with suppress(OSError):
            (old / RECORD_NAME).unlink()
    for parent, _, _ in os.walk(old, topdown=False):
        with suppress(OSError):
            os.rmdir(parent)
    if old.exists():
        logger.warning("%s: the replaced folder cannot be removed, or files were added to it meanwhile", old)


def remove_leftover(folder: Path, find_owned: FindOwned, beat: Callable[[], None] = lambda: None) -> bool:
    """Remove a folder that a kill has left, unless a process writes there; return whether none does.

    It beats as `remove_tree`.

    Raises:
        OutputError: it has files that we did not write, see `check_ours`.
    """
    if (lock := open_locked(folder, os.O_RDONLY | os.O_DIRECTORY)) is None:
        return False
    try:
        check_ours(folder, find_owned)
        record_owned(folder, find_owned)
        remove_tree(folder, beat)
    finally:
        os.close(lock)
    return True


def record_owned(folder: Path, find_owned: FindOwned) -> None:
    """Record the files that a manifest names, before they are removed: it may be gone when a kill leaves others."""
    if not os.path.lexists(folder / RECORD_NAME) and (names := find_owned(folder)):
        with suppress(OSError):  # on a full disk, they are removed without
            write_record(folder, names)


def remove_tree(entry: Path, beat: Callable[[], None] = lambda: None) -> None:
    """Remove a file, a link or a whole folder, including read-only folders, its record last; it beats at each."""
    beat()
    if not entry.is_dir() or entry.is_symlink():
        entry.unlink(missing_ok=True)
        return
    for parent, _, _ in os.walk(entry):
        with suppress(OSError):
            os.chmod(parent, 0o700)
    empty(entry, beat)
    shutil.rmtree(entry)


def empty(folder: Path, beat: Callable[[], None] = lambda: None) -> None:
    """Remove everything in a folder but its record; last what the folder is known by where a full disk has none."""
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST_NAME, path.name == INDEX_NAME)):
        if path.name != RECORD_NAME:
            remove_tree(path, beat)


def _walk(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield every path below a folder, and whether it is a folder; links are not."""

    def refuse(error: OSError) -> None:
        raise refused_by_system(str(error.filename or folder), error, code="output.unreadable") from error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        below = os.path.relpath(parent, folder)
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        folders[:] = sorted(set(folders) - set(links))
        for names, is_folder in ((folders, True), (sorted(files + links), False)):
            for name in names:
                yield name if below == "." else f"{below}/{name}", is_folder


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
