"""source.json: names, headers and order of the original shards, for byte-identical exports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from manifests.digest import digest_pieces
from manifests.errors import ManifestError
from manifests.index import INDEX_NAME, split_by_size
from manifests.jsontext import parse_json_object
from manifests.models import StoredTensors
from manifests.paths import problem_with_path
from manifests.safetensors import LENGTH_NBYTES, Header, TensorEntry, encode_header, layout_tensors, parse_header
from stores.bundles import TensorAt

SUFFIX = ".safetensors"
_MAX_SHARD_NBYTES = 5 << 30  # of the files that an export writes; transformers' own default
_HF_ALIGNMENT = 8  # the safetensors library pads headers to this
_FORMAT, _VERSION = "reshard-source", 1
TargetTensor = tuple[str, str, tuple[int, ...]]  # name, dtype and shape
_FIELDS = {"format", "version", "shards", "index", "dropped"}


@dataclass(frozen=True)
class RecordedShard:
    """One shard of the original checkpoint: its name and the JSON text of its header."""

    name: str
    header_text: bytes

    @property
    def digest(self) -> str:
        """As `Header.digest`, without parsing."""
        return digest_pieces((len(self.header_text).to_bytes(8, "little"), self.header_text))

    @cached_property
    def header(self) -> Header:
        return parse_header(self.header_text, data_nbytes=None, where=f"source.json: {self.name}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """The original checkpoint's shards in order, and its index as written.

    `dropped` names the tensors of these headers that `--drop` left out.
    """

    shards: tuple[RecordedShard, ...]
    index: bytes | None = None
    dropped: tuple[str, ...] = field(default=())

    def stored(self, where: str) -> StoredTensors:
        """Return the names and shapes of the tensors that were not left behind."""
        entries = (entry for shard in self.shards for entry in shard.header.tensors)
        gone = set(self.dropped)
        return StoredTensors(
            tensors={entry.name: entry.shape for entry in entries if entry.name not in gone}, where=where
        )


def encode_record(record: SourceRecord) -> bytes:
    """Return the text of source.json."""
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "shards": [{"name": shard.name, "header": shard.header_text.decode()} for shard in record.shards],
        "index": None if record.index is None else record.index.decode(),
        "dropped": record.dropped,
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def decode_record(text: bytes, where: str = "source.json") -> SourceRecord:
    document = parse_json_object(text, where)
    version = document.get("version")
    if document.get("format") != _FORMAT or type(version) is not int or version != _VERSION:
        raise _bad_record(where, f"expected format {_FORMAT!r}, version {_VERSION}")
    if unknown := sorted(document.keys() - _FIELDS):
        raise _bad_record(f"{where}: {unknown[0]}", f"unknown field in version {_VERSION}")
    shards, index, dropped = document.get("shards"), document.get("index"), document.get("dropped")
    if not isinstance(shards, list) or not all(_is_shard(shard) for shard in shards):
        raise _bad_record(f"{where}: shards", "expected a list of objects with name and header, both strings")
    if "index" not in document or not (index is None or isinstance(index, str)):
        raise _bad_record(f"{where}: index", "expected a string or null")
    if not isinstance(dropped, list) or not all(isinstance(name, str) for name in dropped):
        raise _bad_record(f"{where}: dropped", "expected a list of strings")
    record = SourceRecord(
        shards=tuple(RecordedShard(shard["name"], shard["header"].encode()) for shard in shards),
        index=None if index is None else index.encode(),
        dropped=tuple(dropped),
    )
    _check_names(record, where)
    return record


def lay_out_anew(entries: Sequence[TensorEntry], kinds: Mapping[str, TargetTensor]) -> tuple[TensorEntry, ...]:
    """Return the entries of a shard's converted tensors, with headers and data in the same order as before.

    `kinds` maps each name to the converted name, dtype and shape; other tensors are left out.
    """
    remaining = [entry for entry in entries if entry.name in kinds]
    in_data_order = sorted(remaining, key=lambda entry: (entry.begin, entry.end))
    placed = {entry.name: entry for entry in layout_tensors(kinds[entry.name] for entry in in_data_order)}
    return tuple(placed[kinds[entry.name][0]] for entry in remaining)


def index_anew(before: bytes | None, shards: Mapping[str, Sequence[TensorEntry]]) -> bytes:
    """Return an index for converted tensors, by shard, formatted as transformers does.

    The count of parameters, which transformers 5 writes, is removed if tensors are left out.
    """
    index = {} if before is None else parse_json_object(before, INDEX_NAME)
    metadata, weight_map = index.get("metadata"), index.get("weight_map")
    total = sum(entry.nbytes for entries in shards.values() for entry in entries)
    index["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": total}
    index["weight_map"] = {entry.name: name for name, entries in shards.items() for entry in entries}
    if not isinstance(weight_map, dict) or weight_map.keys() != index["weight_map"].keys():
        index["metadata"].pop("total_parameters", None)
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def new_header_text(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the text of a new header, as the safetensors library writes it."""
    return encode_header(entries, metadata, alignment=_HF_ALIGNMENT)[LENGTH_NBYTES:]


def shard_anew(name: str, tensors: Iterable[TensorAt | TensorEntry]) -> RecordedShard:
    """Return the safetensors file that an export writes of tensors that the source has in a file of another format."""
    entries = layout_tensors((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    return RecordedShard(name, new_header_text(entries, {"format": "pt"}))


def record_anew(tensors: Iterable[TensorAt | TensorEntry], dropped: tuple[str, ...]) -> SourceRecord:
    """Return the record of a source of another format: files of at most 5 GiB, or of one tensor, in order."""
    groups = list(split_by_size(tensors, lambda tensor: tensor.nbytes, _MAX_SHARD_NBYTES)) or [[]]
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}" for number in range(1, count + 1)] if count > 1 else ["model"]
    shards = tuple(shard_anew(name + SUFFIX, group) for name, group in zip(names, groups, strict=True))
    return SourceRecord(shards=shards, index=index_of(shards) if count > 1 else None, dropped=dropped)


def index_of(shards: Iterable[RecordedShard]) -> bytes:
    return index_anew(None, {shard.name: shard.header.tensors for shard in shards})


def _check_names(record: SourceRecord, where: str) -> None:
    """Raise if a file would be written twice or outside its folder, or a tensor is in two files."""
    names: set[str] = set()
    tensors: set[str] = set()
    for position, shard in enumerate(record.shards):
        place = f"{where}: shards[{position}]"
        if problem := problem_with_path(shard.name):
            raise _bad_record(f"{place}.name", problem)
        if not shard.name.endswith(SUFFIX) or shard.name in names:
            raise _bad_record(f"{place}.name", f"expected a unique {SUFFIX} file name, found {shard.name!r}")
        names.add(shard.name)
        for name in shard.header.names:
            if name in tensors:
                raise _bad_record(f"{place}.header: {name!r}", "is in two shards")
            tensors.add(name)
    if unknown := sorted(set(record.dropped) - tensors):
        raise _bad_record(f"{where}: dropped", f"{unknown[0]!r} is in no shard")


def _bad_record(where: str, problem: str) -> ManifestError:
    return ManifestError(where, problem, code="manifest.bad-source-record")


def _is_shard(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("header"), str)
        and value.keys() == {"name", "header"}
    )
