"""The record of what an export wrote to a bucket, so that `--force` replaces that and nothing else.

As for a folder (see `reshard.formats.exported`), the record is beside the prefix and not below it: for
`s3://BUCKET/DIR/NAME` it is the object `DIR/.NAME.exported.json`. It lists the objects of an export, with sizes and
etags of the shards. There is nothing beside a whole bucket, so an export to one is not replaced.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping

from manifests.errors import InputError, UnreachableError
from manifests.jsontext import parse_json_object
from reshard.formats.exported import DATA_SUFFIXES, EXPORT_FORMAT
from stores.address import split_url
from stores.objects.client import ObjectEntry
from stores.objects.output import ObjectTarget
from stores.objects.store import Client
from stores.objects.writable import WritableClient, open_writable

logger = logging.getLogger(__name__)

_MAX_RECORD_NBYTES = 64 << 20


def objects_of_export(client: Client, listed: Mapping[str, ObjectEntry]) -> Collection[str] | None:
    """Return the names that an export wrote below a prefix, or None if there is no record of that.

    Raises:
        UnreachableError: the store failed.
    """
    recorded = _recorded(client.url)
    shards = [name for name in recorded if name.endswith(DATA_SUFFIXES) and name in listed]
    # A shard may have been removed; one that was overwritten is somebody else's work.
    is_export = bool(shards) and all(listed[name].etag and _state(listed[name]) == recorded[name] for name in shards)
    return recorded.keys() if is_export else None


def record_exported_objects(objects: ObjectTarget, names: Iterable[str]) -> None:
    """Record an export whose shards are uploaded, before the object that makes it valid is written."""
    beside = _beside(objects.url)
    written = objects.written()
    if beside is None:
        return
    client, path = beside
    shards = {name: _state(written[name]) for name in names if name.endswith(DATA_SUFFIXES) and name in written}
    body = {"format": EXPORT_FORMAT, "version": 1, "exports": [{name: shards.get(name, "") for name in sorted(names)}]}
    try:
        client.put(path, json.dumps(body, indent=1).encode())
    except UnreachableError:
        raise
    except InputError as error:
        logger.warning("%s: could not record this export, so --force will not replace it later: %s", error.where, error)


def _recorded(url: str) -> Mapping[str, str]:
    beside = _beside(url)
    if beside is None:
        return {}
    client, path = beside
    try:
        entry = client.look_up(path)
        if not 0 < entry.nbytes <= _MAX_RECORD_NBYTES:
            return {}
        body = parse_json_object(b"".join(client.read(entry, 0, entry.nbytes)), f"{client.url}/{path}")
    except UnreachableError:
        raise
    except InputError:
        return {}
    exports = body.get("exports")
    if body.get("format") != EXPORT_FORMAT or body.get("version") != 1 or not isinstance(exports, list):
        return {}
    return next((files for files in exports if isinstance(files, dict)), {})


def _beside(url: str) -> tuple[WritableClient, str] | None:
    """Return a client of the prefix's parent, and the name of the record there."""
    if not split_url(url)[2]:
        return None
    parent, _, name = url.rpartition("/")
    return open_writable(parent), f".{name}.exported.json"


def _state(entry: ObjectEntry) -> str:
    return f"{entry.nbytes} bytes, etag {entry.etag}"
