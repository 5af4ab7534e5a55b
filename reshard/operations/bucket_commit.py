"""The commit of a pack in parts in a bucket: see Note [Parts in a bucket]."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from manifests.codec import decode_manifest, encode_manifest
from manifests.errors import InputError, OutputError, UsageError
from manifests.index import INDEX_NAME
from manifests.invariants import MANIFEST_NAME, check_manifest
from manifests.owned import files_in
from manifests.schema import Manifest, Shard
from reshard.operations.pack import index_file
from reshard.operations.part_objects import (
    CHOSEN,
    OF_PART,
    PackedShard,
    check_creates,
    complete_attempts,
    folders_in,
    folders_of,
    manifest_in,
    other_plan,
    read_record,
)
from stores.base import PART_NAME, Blocks
from stores.object_client import ObjectEntry
from stores.object_output import SMALL_NBYTES
from stores.object_writer import ObjectWriter
from stores.objects import ObjectFile, list_objects, open_objects
from stores.writable import WritableClient, open_writable, remove_objects

__all__ = ["commit_in_bucket"]

logger = logging.getLogger(__name__)


def commit_in_bucket(out: str, *, force: bool) -> Manifest | None:
    """Write the manifest of what all parts have written, and then remove what only they needed.

    It can be killed at any point and run again. Return None if there is nothing to do.

    Raises:
        UsageError: with `force`, which would remove an old output before there is a new one.
        OutputError: parts are missing or damaged, or something else is there.
        InputError: the bucket cannot be reached or written.
    """
    if force:
        problem, hint = "is not supported for parts in a bucket", "remove the old output first"
        raise UsageError("--force", problem, hint, code="options.conflict")
    client = open_writable(out)
    listed = list_objects(client)
    manifest, folders = manifest_in(client, listed), folders_in(listed)
    if manifest is not None and folders - folders_of(manifest):
        raise OutputError(client.url, "already exists", "remove it, or pack to another --out", code="output.exists")
    if manifest is not None:
        return manifest if _clear_away(client, manifest) else None
    if not folders:
        hint = "run reshard pack --part first"
        raise OutputError(client.url, "there are no packed parts to commit", hint, code="output.no-parts")
    if len(folders) > 1:
        raise other_plan(client, folders)
    client = client.settled()
    check_creates(client, *folders)
    manifest = _publish(client, listed, *folders)
    _clear_away(client, manifest)
    return manifest


def _publish(client: WritableClient, listed: Mapping[str, ObjectEntry], folder: str) -> Manifest:
    """Write the auxiliary files, the index and, last, the manifest, and return it."""
    places, records = _gather(client, listed, folder)
    paths = {path: f"{places[number]}/{path}" for number, record in records.items() for path in record["shards"]}
    written: dict[str, PackedShard] = {
        path: each for record in records.values() for path, each in record["shards"].items()
    }
    draft = decode_manifest(records[1]["manifest"].encode(), f"{client.url}/{places[1]}/{PART_NAME}")
    ordered = [shard.path for stage in draft.stages for shard in stage.shards]
    indexed = {path: names for path in ordered if (names := written[path]["names"]) is not None}

    def complete(shard: Shard) -> Shard:
        return replace(shard, path=paths[shard.path], digest=written[shard.path]["digest"])

    stages = (replace(stage, shards=tuple(map(complete, stage.shards))) for stage in draft.stages)
    manifest = replace(draft, stages=tuple(stages))
    check_manifest(manifest)
    first = open_objects(f"{client.url}/{places[1]}")
    files: dict[str, Blocks] = {item.path: Blocks(first.file(item.path), item.digest) for item in manifest.files}
    if indexed:
        weights = {paths[path]: names for path, names in indexed.items()}
        files[INDEX_NAME] = Blocks(index_file(weights, sum(written[path]["data_nbytes"] for path in indexed)))
    for name in listed:
        if OF_PART.fullmatch(name) is None and name not in files:
            raise OutputError(client.url, "already exists", "choose another --out", code="output.exists")
    for name, blocks in files.items():
        _put(client, name, blocks, listed)
    if not client.create(MANIFEST_NAME, encode_manifest(manifest)):
        problem, hint = "another process has finished here", "run reshard commit again"
        raise OutputError(client.url, problem, hint, code="output.contended")
    return manifest


def _put(client: WritableClient, name: str, blocks: Blocks, listed: Mapping[str, ObjectEntry]) -> None:
    """Write a file of any length; one that a killed commit has written is the same, any other is refused."""
    where = f"{client.url}/{name}"
    if name in listed:
        for _ in blocks:  # hashed
            pass
        found = Blocks(ObjectFile(url=where, entry=listed[name], client=client))
        for _ in found:
            pass
        if found.digest != blocks.digest:
            hint = "move it elsewhere, or choose another --out"
            raise OutputError(where, "was not written by this command", hint, code="output.foreign-file")
        return
    if blocks.nbytes <= SMALL_NBYTES:
        client.put(name, b"".join(map(bytes, blocks)))
        return
    ObjectWriter(where, client.upload(name, blocks.nbytes), blocks.nbytes, lambda: None).write_all(blocks)


def _gather(
    client: WritableClient, listed: Mapping[str, ObjectEntry], folder: str
) -> tuple[dict[int, str], dict[int, dict[str, Any]]]:
    """Return for each part the folder of the attempt that is chosen, and that attempt's record.

    Raises:
        OutputError: a part is not done, or a shard is not what its part has written.
    """
    places, chosen = complete_attempts(listed, folder), f"{folder}/{CHOSEN}"
    if chosen in listed:
        places |= {int(number): place for number, place in read_record(client, chosen).items()}
    records = {
        number: read_record(client, f"{place}/{PART_NAME}")
        for number, place in places.items()
        if f"{place}/{PART_NAME}" in listed
    }
    of = max((int(found["of"] or 0) for found in map(OF_PART.fullmatch, listed) if found), default=0)
    if missing := [number for number in range(1, max(1, of) + 1) if number not in records]:
        numbers, hint = ", ".join(map(str, missing)), ""
        for record in islice(records.values(), 1):
            hint = f"run {shlex.join([*record['command'], '--part', f'{missing[0]}/{of}'])}"
        problem = f"part{'s' if len(missing) > 1 else ''} {numbers} of {of} not finished"
        raise OutputError(client.url, problem, hint, code="output.missing-parts")
    for number, place in places.items():
        for path, (nbytes, etag) in records[number]["objects"].items():
            entry = listed.get(f"{place}/{path}")
            is_same = entry is not None and entry.nbytes == nbytes
            if not is_same or (entry and etag and entry.etag and entry.etag != etag):
                problem = "is not the object that a part has written"
                hint = f"remove {place} and, if there, {chosen} from the bucket, and run part {number} again"
                raise OutputError(f"{client.url}/{place}/{path}", problem, hint, code="output.damaged-parts")
    if chosen not in listed and not client.create(chosen, json.dumps(places, sort_keys=True).encode()):
        problem, hint = "another process is committing here", "run reshard commit again"
        raise OutputError(client.url, problem, hint, code="output.contended")
    return places, records


def _clear_away(client: WritableClient, manifest: Manifest) -> bool:
    """Remove what only the parts of a manifest needed; return whether there was any."""
    kept, folders = set(files_in(manifest)), folders_of(manifest)
    gone = [name for name in list_objects(client) if name not in kept and folders_in([name]) & folders]
    try:
        remove_objects(client, gone)
    except InputError as error:  # not allowed to, perhaps
        logger.warning("%s is complete, but more than that stays there: %s", client.url, error.problem)
    return bool(gone)
