"""The record of what an export wrote, so that `--force` replaces that and nothing else.

The record is beside the folder or the prefix, since what an export writes must equal the source: for `DIR/NAME` it is
`DIR/.NAME.exported.json`, a file or an object. It lists the files of an export, with sizes and modification times, or
etags, of the shards: a folder with other shards is not that export. There is nothing beside a whole bucket, so an
export to one is not replaced.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from manifests.errors import InputError, Parameter, UnreachableError
from manifests.jsontext import parse_json_object
from manifests.store import read_small_file, write_file
from reshard.archives.names import DATA_SUFFIX
from reshard.tensors.source_index import SUFFIX
from stores.address import split_url
from stores.local import LocalFile
from stores.objects.client import ObjectEntry
from stores.objects.output import ObjectTarget
from stores.objects.store import Client
from stores.objects.writable import WritableClient, open_writable

logger = logging.getLogger(__name__)

_FORMAT = "reshard-export"
_SHARD_SUFFIXES = (SUFFIX, DATA_SUFFIX, ".pt")
_MAX_RECORD_NBYTES = 64 << 20
_Files = Mapping[str, str]  # state of each shard, "" of other files, by path


def files_of_export(out: Path) -> Collection[str] | None:
    """Return the paths that an export wrote to a folder, or None if there is no record of that."""
    return next((files.keys() for files in _recorded_files(out) if _describes(files, out)), None)


def record_export(out: Path, folder: Path, names: Iterable[str], *, is_published: bool) -> None:
    """Record the files of `folder`, which becomes `out`; until it is published, those of the earlier `out` as well."""
    files = {name: _state_of_file(folder / name) for name in sorted(names)}
    earlier = [] if is_published else [files for files in _recorded_files(out) if _describes(files, out)]
    write_file(_record_path(out), _encoded([files, *earlier]))


def objects_of_export(client: Client, listed: Mapping[str, ObjectEntry]) -> Collection[str] | None:
    """Return the names that an export wrote below a prefix, or None if there is no record of that.

    Raises:
        UnreachableError: the store failed.
    """
    recorded = _recorded_objects(client.url)
    shards = [name for name in recorded if name.endswith(_SHARD_SUFFIXES) and name in listed]
    # A shard may have been removed; one that was overwritten is somebody else's work.
    is_export = bool(shards) and all(
        listed[name].etag and _state_of_object(listed[name]) == recorded[name] for name in shards
    )
    return recorded.keys() if is_export else None


def record_exported_objects(objects: ObjectTarget, names: Iterable[str]) -> None:
    """Record an export whose shards are uploaded, before the object that makes it valid is written."""
    beside = _beside(objects.url)
    written = objects.written()
    if beside is None:
        return
    client, path = beside
    shards = {name: written[name] for name in names if name.endswith(_SHARD_SUFFIXES) and name in written}
    files = {name: _state_of_object(shards[name]) if name in shards else "" for name in sorted(names)}
    try:
        client.put(path, _encoded([files]))
    except UnreachableError:
        raise
    except InputError as error:
        again = f"could not record this export, so {Parameter('force', True)} will not replace it later"
        logger.warning("%s: %s: %s", error.where, again, error)


def _encoded(exports: Sequence[_Files]) -> bytes:
    return json.dumps({"format": _FORMAT, "version": 1, "exports": exports}, indent=1).encode()


def _decoded(data: bytes, where: str) -> list[_Files]:
    """Return the exports that a record lists; none if it is another file."""
    body = parse_json_object(data, where)
    exports = body.get("exports")
    if body.get("format") != _FORMAT or body.get("version") != 1 or not isinstance(exports, list):
        return []
    return [files for files in exports if isinstance(files, dict)]


def _record_path(out: Path) -> Path:
    out = out.resolve() if out.name in ("", "..") else out
    name = out.name
    if name.startswith(".") and name.endswith(".partial"):  # what `out` was a moment ago, or is about to be
        name = name[1:].removesuffix(".partial")
    return out.parent / f".{name}.exported.json"


def _recorded_files(out: Path) -> list[_Files]:
    path = _record_path(out)
    if not os.path.lexists(path):
        return []
    try:
        return _decoded(read_small_file(path), str(path))
    except InputError:
        return []


def _describes(files: _Files, out: Path) -> bool:
    """Whether a folder's shards are those of the record; shards that were removed do not count."""
    shards = [name for name in files if name.endswith(_SHARD_SUFFIXES) and os.path.lexists(out / name)]
    return bool(shards) and all(_state_of_file(out / name) == files[name] for name in shards)


def _state_of_file(path: Path) -> str:
    return LocalFile(path).fingerprint if path.name.endswith(_SHARD_SUFFIXES) and not path.is_symlink() else ""


def _recorded_objects(url: str) -> _Files:
    beside = _beside(url)
    if beside is None:
        return {}
    client, path = beside
    try:
        entry = client.look_up(path)
        if not 0 < entry.nbytes <= _MAX_RECORD_NBYTES:
            return {}
        data = b"".join(client.read(entry, 0, entry.nbytes))
        return next(iter(_decoded(data, f"{client.url}/{path}")), {})
    except UnreachableError:
        raise
    except InputError:
        return {}


def _beside(url: str) -> tuple[WritableClient, str] | None:
    """Return a client of the prefix's parent, and the name of the record there."""
    if not split_url(url)[2]:
        return None
    parent, _, name = url.rpartition("/")
    return open_writable(parent), f".{name}.exported.json"


def _state_of_object(entry: ObjectEntry) -> str:
    return f"{entry.nbytes} bytes, etag {entry.etag}"
