"""The objects of a pack in parts in a bucket, by name: see Note [Parts in a bucket]."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypedDict

from manifests.codec import decode_manifest
from manifests.errors import OutputError, UsageError
from manifests.invariants import MANIFEST_NAME
from manifests.jsontext import parse_json_object
from manifests.schema import Manifest
from stores.base import PART_NAME
from stores.writable import WritableClient, remove_objects

__all__ = [
    "CHOSEN", "OF_PART", "PackedShard", "check_creates", "complete_attempts", "folders_in", "folders_of", "manifest_in",
    "other_plan", "read_record",
]  # fmt: skip

CHOSEN = "chosen"
OF_PART = re.compile(
    r"(?P<folder>parts-[0-9a-f]{12})/(?:chosen|probe-[0-9a-f]{32}|(?P<part>part-(?P<number>[0-9]{5})-of-(?P<of>[0-9]{5}))"
    r"\.(?:claim-[0-9]+|(?P<attempt>[0-9]+)/(?P<path>.+)))",
    re.ASCII,
)


class PackedShard(TypedDict):
    """A shard in an attempt's record. `names` are its tensors, if the index lists it."""

    digest: str
    names: list[str] | None
    data_nbytes: int


def check_creates(client: WritableClient, folder: str) -> None:
    """Refuse a store that writes over an object that should only be created where none is.

    Raises:
        UsageError: it does.
    """
    name = f"{folder}/probe-{uuid.uuid4().hex}"
    is_atomic = client.create(name, b"1") and not client.create(name, b"2")
    remove_objects(client, [name])
    if not is_atomic:
        problem = "this store, or AWS_CONDITIONAL_PUT, does not create an object only where there is none"
        raise UsageError(client.url, problem, "pack into a folder, and copy it", code="options.parts-store")


def read_record(client: WritableClient, name: str) -> dict[str, Any]:
    return parse_json_object(client.load(name), f"{client.url}/{name}")


def _attempts(names: Iterable[str]) -> Iterator[re.Match[str]]:
    """Yield the names of objects of attempts, taken apart."""
    for name in names:
        found = OF_PART.fullmatch(name)
        if found is not None and found["path"] is not None:
            yield found


def complete_attempts(names: Iterable[str], folder: str) -> dict[int, str]:
    """Return the folder of the first complete attempt at each part that has one, by the part's number."""
    found = [each for each in _attempts(names) if each["folder"] == folder and each["path"] == PART_NAME]
    found.sort(key=lambda each: int(each["attempt"]), reverse=True)
    return {int(each["number"]): f"{folder}/{each['part']}.{each['attempt']}" for each in found}


def folders_in(names: Iterable[str]) -> set[str]:
    """Return the folders of parts that objects are in."""
    return {found["folder"] for found in map(OF_PART.fullmatch, names) if found}


def folders_of(manifest: Manifest | None) -> set[str]:
    return set() if manifest is None else folders_in(shard.path for shard in manifest.shards)


def manifest_in(client: WritableClient, listed: Collection[str]) -> Manifest | None:
    if MANIFEST_NAME not in listed:
        return None
    return decode_manifest(client.load(MANIFEST_NAME), f"{client.url}/{MANIFEST_NAME}")


def other_plan(client: WritableClient, folders: Collection[str]) -> OutputError:
    named = ", ".join(f"{client.url}/{folder}" for folder in sorted(folders))
    return OutputError(
        client.url,
        "parts here have another plan: their source, its path or time, layout, number of parts or reshard version "
        f"differs ({named})",
        "run all parts with the same arguments and one copy of the source, and remove those of the other plan",
        code="output.other-plan",
    )
