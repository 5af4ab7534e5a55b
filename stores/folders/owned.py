"""Files of a folder that a command may replace: those that it wrote. Everything else in the folder is kept.

# Note [Files of others in an output]
`--force` replaces a folder atomically, by exchanging two names. Files that we did not write (notes, `.git`, a
checkpoint inside) must be in the folder both before and after the exchange, so they are in both folders when it
happens: regular files, links, pipes and sockets as hard links, folders as folders of the same mode, owner and times.
If something cannot be linked (another file system is mounted there, or links are not supported), `--force` refuses
and changes nothing.

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
from manifests.index import INDEX_NAME, has_index
from manifests.invariants import MANIFEST_NAME
from manifests.jsontext import parse_json_object
from manifests.readers import is_consulted
from manifests.schema import Manifest
from manifests.store import read_small_file, write_file
from stores.manifest_file import open_manifest

# Returns the paths below a folder that may be removed; None: the folder was not written by this command.
FindOwned = Callable[[Path], Collection[str] | None]

logger = logging.getLogger(__name__)

RECORD_NAME = ".journal"
_NUM_SHOWN = 5
_RANDOM = re.compile(r"[0-9a-f]{32}")
_HINT = "move it out of the folder, or choose another folder"


def files_of_manifest(folder: Path) -> Collection[str] | None:
    """Return the paths that a folder's manifest lists, its own and the index included; None if none can be read.

    Raises:
        UnreachableError: the disk, the mount or the network failed.
    """
    try:
        manifest = open_manifest(folder).manifest
    except UnreachableError:
        raise
    except InputError:
        return None
    return frozenset(files_in(manifest))


def files_in(manifest: Manifest) -> Iterator[str]:
    """Yield the paths of a checkpoint's files: shards, auxiliary files, the index and the manifest itself."""
    yield from (shard.path for shard in manifest.shards)
    yield from (file.path for file in manifest.files)
    if has_index(manifest):
        yield INDEX_NAME
    yield MANIFEST_NAME


def foreign_files(folder: Path, owned: Collection[str]) -> list[str]:
    """Return what is in a folder besides the `owned` files: files, links, and folders without `owned` files."""
    return [path for path, _ in _others(folder, owned)]


def write_record(folder: Path, names: Collection[str]) -> None:
    """Record the files that are written in a folder under construction, or removed from one, as ours."""
    write_file(folder / RECORD_NAME, (json.dumps({"names": sorted(names)}) + "\n").encode())


def check_ours(
    folder: Path,
    find_owned: FindOwned = files_of_manifest,
    *,
    wanted: Collection[str] = (),
    linked: Path | None = None,
) -> None:
    """Refuse files that we did not write: see Note [Whose a folder under construction is].

    Where there is a record, the `wanted` files are ours, too. Links to files at the same path in `linked` are not
    looked at: they were about to be kept in its successor. Folders without files belong to nobody.

    Raises:
        OutputError: naming the first few of those files.
    """
    names = _recorded(folder / RECORD_NAME)
    written = () if names is None else (RECORD_NAME, *names, *wanted)
    owned = {f".{RECORD_NAME}.partial", *written, *(find_owned(folder) or ())}  # the record itself is written first
    others = [path for path, is_folder in _walk(folder) if not is_folder and path not in owned]
    bases = {path.rpartition("/")[2] for path in owned}
    foreign = [path for path in others if not (names is not None and _is_temporary(path, bases))]
    foreign = [path for path in foreign if linked is None or not _is_same(folder / path, linked / path)]
    if foreign:
        more = f" and {len(foreign) - _NUM_SHOWN} more" if len(foreign) > _NUM_SHOWN else ""
        problem = "has the name of a folder under construction, and files that this command did not write: "
        problem += ", ".join(foreign[:_NUM_SHOWN]) + more
        hint = "move them elsewhere, or remove the folder"
        raise OutputError(str(folder), problem, hint, code="output.foreign-partial")


def _recorded(path: Path) -> Collection[str] | None:
    """Return the names in a record, None if there is none."""
    if path.is_symlink() or not path.is_file():
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


def _is_same(path: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.lstat(other))
    except OSError:
        return False


def check_room(out: Path, owned: Collection[str], wanted: Collection[str]) -> None:
    """Refuse an output with a file of the same path as somebody else's file in the folder that it replaces.

    Raises:
        OutputError: naming the first such file, or all that programs would read with the output.
    """
    _refuse_consulted(out, owned)
    above = {parent for path in wanted for parent in _parents(path)}
    for path, is_folder in _others(out, owned):
        if path in wanted or (not is_folder and path in above):
            raise _in_the_way(out / path)


def keep_others(out: Path, owned: Collection[str], new: Path) -> None:
    """Link everything in `out` that is not `owned` into the `new` folder, at the same path.

    Raises:
        OutputError: something cannot be linked, has the path of a file of the new output, or would be read with it.
    """
    _refuse_consulted(out, owned)
    folders: list[str] = []
    for path, is_folder in _others(out, owned):
        source, target = out / path, new / path
        try:
            if is_folder:
                if not target.is_dir() or target.is_symlink():
                    target.mkdir()
                    folders.append(path)
            else:
                for parent in reversed(_parents(path)):  # a folder of ours with only others' files left
                    if not (new / parent).is_dir() or (new / parent).is_symlink():
                        (new / parent).mkdir()
                        folders.append(parent)
                os.link(source, target, follow_symlinks=False)
        except FileExistsError as error:
            raise _in_the_way(source) from error
        except OSError as error:
            problem = f"was not written by this command and cannot be kept: {error.strerror}"
            raise OutputError(str(source), problem, _HINT, code="output.foreign-file") from error
    for path in reversed(folders):  # last: a folder may be read-only, and writing to it changes its times
        found = os.stat(out / path)
        os.chown(new / path, found.st_uid, found.st_gid)
        shutil.copystat(out / path, new / path)


def remove_replaced(old: Path, owned: Collection[str], new: Path) -> None:
    """Remove a replaced folder; files that were added since `keep_others` are moved to the new folder.

    The new folder is already in place: what cannot be removed is logged, and left to the next run.
    """
    for _ in range(2):  # retry once
        if old.exists():
            _remove_replaced(old, owned, new)
    if old.exists():
        logger.warning("%s: failed to remove the replaced folder; the next run into %s removes it", old, new)


def _remove_replaced(old: Path, owned: Collection[str], new: Path) -> None:
    for path, is_folder in sorted(_walk(old), key=lambda found: found[0] == RECORD_NAME):  # last: until then it is ours
        entry, kept = old / path, new / path
        with suppress(OSError):
            if is_folder:
                entry.chmod(0o700 | entry.stat().st_mode)
                if not kept.is_dir() and path not in {parent for name in owned for parent in _parents(name)}:
                    kept.mkdir()
            elif path in owned or (os.path.lexists(kept) and os.path.samestat(os.lstat(entry), os.lstat(kept))):
                entry.unlink()
            elif not os.path.lexists(kept):
                kept.parent.mkdir(parents=True, exist_ok=True)
                os.rename(entry, kept)
    for parent, _, _ in os.walk(old, topdown=False):
        with suppress(OSError):
            os.rmdir(parent)


def remove_tree(entry: Path) -> None:
    """Remove a file, a link or a whole folder, including read-only folders, its record last."""
    if not entry.is_dir() or entry.is_symlink():
        entry.unlink(missing_ok=True)
        return
    for parent, _, _ in os.walk(entry):
        with suppress(OSError):
            os.chmod(parent, 0o700)
    empty(entry)
    shutil.rmtree(entry)


def empty(folder: Path) -> None:
    """Remove everything in a folder but its record."""
    for path in folder.iterdir():
        if path.name != RECORD_NAME:
            remove_tree(path)


def _others(out: Path, owned: Collection[str]) -> Iterator[tuple[str, bool]]:
    """Yield the paths in a folder that are not `owned`, and whether each is a folder; folders before their contents.

    Raises:
        OutputError: a folder that cannot be listed, or where another file system is mounted.
    """
    above, device = {parent for path in owned for parent in _parents(path)}, os.stat(out).st_dev
    for path, is_folder in _walk(out):
        if is_folder and os.lstat(out / path).st_dev != device:
            raise OutputError(str(out / path), "another file system is mounted here", _HINT, code="output.foreign-file")
        if path not in (above if is_folder else owned):
            yield path, is_folder


def _refuse_consulted(out: Path, owned: Collection[str]) -> None:
    """Refuse to keep files beside an output that programs would read as a part of it.

    Raises:
        OutputError: naming all of them.
    """
    if names := [path for path, is_folder in _others(out, owned) if not is_folder and is_consulted(path)]:
        raise OutputError(str(out / names[0]), read_with_output(names), _HINT, code="output.foreign-file")


def read_with_output(names: Sequence[str]) -> str:
    """Return what is wrong with keeping these files, the first of which the sentence is about, beside an output."""
    more = f"; others are {', '.join(names[1:])}" if names[1:] else ""
    return f"was not written by this command, and programs would read it with the new output{more}"


def _walk(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield every path below a folder, and whether it is a folder; links are not.

    Raises:
        OutputError: a folder that cannot be listed.
    """

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
    """Return the parent folders of a path, the nearest first."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _in_the_way(path: Path) -> InputError:
    problem = "was not written by this command, and the new output has a file of this name"
    return OutputError(str(path), problem, _HINT, code="output.foreign-file")
