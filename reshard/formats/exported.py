"""The record of what an export wrote, so that `--force` replaces that and nothing else.

The record is a file beside the folder, `.NAME.exported.json`, since the folder itself must equal the source. It lists
the files of an export, with sizes and modification times of the shards: a folder with other shards is not that export.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from manifests.errors import InputError
from manifests.jsontext import parse_json_object
from manifests.store import read_small_file, write_file
from reshard.archives.names import DATA_SUFFIX
from reshard.tensors.source_index import SUFFIX
from stores.local import LocalFile

EXPORT_FORMAT = "reshard-export"
DATA_SUFFIXES = (SUFFIX, DATA_SUFFIX, ".pt")
_Files = Mapping[str, str]  # size and time of each shard, "" of other files, by path


def files_of_export(out: Path) -> Collection[str] | None:
    """Return the paths that an export wrote to a folder, or None if there is no record of that."""
    return next((files.keys() for files in _recorded(out) if _describes(files, out)), None)


def record_export(out: Path, folder: Path, names: Iterable[str], *, is_published: bool) -> None:
    """Record the files of `folder`, which becomes `out`; until it is published, those of the earlier `out` as well."""
    files = {name: _state(folder / name) for name in sorted(names)}
    earlier = [] if is_published else [files for files in _recorded(out) if _describes(files, out)]
    body = {"format": EXPORT_FORMAT, "version": 1, "exports": [files, *earlier]}
    write_file(_record_path(out), json.dumps(body, indent=1).encode())


def _record_path(out: Path) -> Path:
    out = out.resolve() if out.name in ("", "..") else out
    name = out.name
    if name.startswith(".") and name.endswith(".partial"):  # what `out` was a moment ago, or is about to be
        name = name[1:].removesuffix(".partial")
    return out.parent / f".{name}.exported.json"


def _recorded(out: Path) -> list[_Files]:
    path = _record_path(out)
    if not os.path.lexists(path):
        return []
    try:
        body = parse_json_object(read_small_file(path), str(path))
    except InputError:
        return []
    if body.get("format") != EXPORT_FORMAT or body.get("version") != 1 or not isinstance(body.get("exports"), list):
        return []
    return [files for files in body["exports"] if isinstance(files, dict)]


def _describes(files: _Files, out: Path) -> bool:
    """Whether a folder's shards are those of the record; shards that were removed do not count."""
    shards = [name for name in files if name.endswith(DATA_SUFFIXES) and os.path.lexists(out / name)]
    return bool(shards) and all(_state(out / name) == files[name] for name in shards)


def _state(path: Path) -> str:
    return LocalFile(path).fingerprint if path.name.endswith(DATA_SUFFIXES) and not path.is_symlink() else ""
