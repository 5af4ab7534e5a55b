"""source.json: the original shards' names, headers and order, which a byte-identical export needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from manifests.digest import digest_bytes
from manifests.errors import InputError
from manifests.jsontext import parse_json_object
from manifests.paths import problem_with_path
from manifests.safetensors import Header, TensorEntry, layout_tensors, parse_header

__all__ = [
    "INDEX_NAME",
    "SUFFIX",
    "RecordedShard",
    "SourceRecord",
    "decode_record",
    "encode_record",
    "index_anew",
    "lay_out_anew",
]

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_FORMAT, _VERSION = "reshard-source", 1
Kind = tuple[str, str, tuple[int, ...]]  # name, dtype and shape
_FIELDS = {"format", "version", "shards", "index", "dropped"}


@dataclass(frozen=True)
class RecordedShard:
    """One shard of the original checkpoint: its name and the JSON text of its header."""

    name: str
    header_text: str

    @property
    def digest(self) -> str:
        """As `Header.digest`, without parsing."""
        text = self.header_text.encode()
        return digest_bytes(len(text).to_bytes(8, "little") + text)

    @cached_property
    def header(self) -> Header:
        return parse_header(self.header_text.encode(), data_nbytes=None, where=f"source.json: {self.name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """The original checkpoint's shards in their order, and its index as it was written.

    `dropped` names tensors of those headers that `--drop` left behind.
    """

    shards: tuple[RecordedShard, ...]
    index_text: str | None = None
    dropped: tuple[str, ...] = field(default=())


def encode_record(record: SourceRecord) -> bytes:
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "shards": [{"name": shard.name, "header": shard.header_text} for shard in record.shards],
        "index": record.index_text,
        "dropped": list(record.dropped),
    }
    return (json.dumps(document, indent=1, ensure_ascii=True) + "\n").encode()


def decode_record(text: bytes, where: str = "source.json") -> SourceRecord:
    """Read source.json.

    Raises:
        InputError: not source.json, or of another version.
    """
    document = parse_json_object(text, where)
    version = document.get("version")
    if document.get("format") != _FORMAT or type(version) is not int or version != _VERSION:
        raise InputError(where, f"expected format {_FORMAT!r}, version {_VERSION}")
    if unknown := sorted(document.keys() - _FIELDS):
        raise InputError(f"{where}: {unknown[0]}", f"is no field of version {_VERSION}")
    shards, index, dropped = document.get("shards"), document.get("index"), document.get("dropped")
    if not isinstance(shards, list) or not all(_is_shard(shard) for shard in shards):
        raise InputError(f"{where}: shards", "expected a list of objects with name and header, both strings")
    if not (index is None or isinstance(index, str)):
        raise InputError(f"{where}: index", "expected a string or null")
    if not isinstance(dropped, list) or not all(isinstance(name, str) for name in dropped):
        raise InputError(f"{where}: dropped", "expected a list of strings")
    record = SourceRecord(
        shards=tuple(RecordedShard(shard["name"], shard["header"]) for shard in shards),
        index_text=index,
        dropped=tuple(dropped),
    )
    _check_names(record, where)
    return record


def lay_out_anew(entries: Sequence[TensorEntry], kinds: Mapping[str, Kind]) -> tuple[TensorEntry, ...]:
    """Give what becomes of a shard's tensors, listed in the same order, their data in the same order as well.

    `kinds` says by old names what they are now; tensors that it does not name are gone.
    """
    left = [entry for entry in entries if entry.name in kinds]
    in_data_order = sorted(left, key=lambda entry: (entry.begin, entry.end))
    placed = {entry.name: entry for entry in layout_tensors(kinds[entry.name] for entry in in_data_order)}
    return tuple(placed[kinds[entry.name][0]] for entry in left)


def index_anew(text: str, shards: Mapping[str, Sequence[TensorEntry]]) -> str:
    """Give the text of an index for other tensors, by shard, in transformers' own spelling.

    A count of parameters, which transformers 5 writes, goes when tensors do.
    """
    index = parse_json_object(text.encode(), INDEX_NAME)
    metadata, before = index.get("metadata"), index.get("weight_map")
    total = sum(entry.nbytes for entries in shards.values() for entry in entries)
    index["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": total}
    index["weight_map"] = {entry.name: name for name, entries in shards.items() for entry in entries}
    if not isinstance(before, dict) or before.keys() != index["weight_map"].keys():
        index["metadata"].pop("total_parameters", None)
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _check_names(record: SourceRecord, where: str) -> None:
    """Refuse a file that would be written twice, or outside its folder, and a tensor that is in two files."""
    names: set[str] = set()
    tensors: set[str] = set()
    for position, shard in enumerate(record.shards):
        place = f"{where}: shards[{position}]"
        if problem := problem_with_path(shard.name):
            raise InputError(f"{place}.name", problem)
        if not shard.name.endswith(SUFFIX) or shard.name in names:
            raise InputError(f"{place}.name", f"expected a {SUFFIX} file of its own, found {shard.name!r}")
        names.add(shard.name)
        for entry in shard.header.tensors:
            if entry.name in tensors:
                raise InputError(f"{place}.header: {entry.name!r}", "is in two shards")
            tensors.add(entry.name)
    if unknown := sorted(set(record.dropped) - tensors):
        raise InputError(f"{where}: dropped", f"{unknown[0]!r} is in no shard")


def _is_shard(found: object) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("name"), str)
        and isinstance(found.get("header"), str)
        and found.keys() == {"name", "header"}
    )
