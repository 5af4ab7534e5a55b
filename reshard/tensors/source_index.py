"""source.json: names, headers and order of the original shards, for byte-identical exports."""

from __future__ import annotations

import json
import re
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from manifests.digest import digest_pieces
from manifests.errors import InputError, ManifestError
from manifests.headertext import TensorEntry
from manifests.index import INDEX_NAME, split_by_size
from manifests.jsontext import parse_json_object
from manifests.models import StoredTensors
from manifests.paths import problem_with_path
from manifests.safetensors import LENGTH_NBYTES, Header, encode_header, layout_tensors, parse_header
from stores.base import MAX_WHOLE_NBYTES, Blocks, InputFile, read_whole
from stores.bundles import TensorAt

SUFFIX = ".safetensors"
_PIECE_NBYTES = 1 << 20
_MAX_SHARD_NBYTES = 5 << 30  # of the files that an export writes; transformers' own default
_HF_ALIGNMENT = 8  # the safetensors library pads headers to this
_FORMAT, _VERSION = "reshard-source", 1
TargetTensor = tuple[str, str, tuple[int, ...]]  # name, dtype and shape
_BEGIN = f'{{\n "format": "{_FORMAT}",\n "version": {_VERSION},\n "shards": ['.encode()
# In a JSON string: some thousand characters, or escapes of characters, but no half of a surrogate pair.
_CHARACTERS = re.compile(
    rb'(?:[ !#-\[\]-~]{1,1024}+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}){1,4096}+"
)
_FIELDS = {"format", "version", "shards", "index", "dropped"}


class KeptText:
    """A long text, compressed in memory: headers and indexes shrink to a tenth."""

    __slots__ = ("_packed",)

    def __init__(self, text: bytes | Iterable[bytes]) -> None:
        packer = zlib.compressobj(1)
        packed = [packer.compress(piece) for piece in ((text,) if isinstance(text, bytes) else text)]
        self._packed = b"".join((*packed, packer.flush()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptText) and (self._packed == other._packed or self.text == other.text)

    def __hash__(self) -> int:
        return hash(self._packed[-4:])  # the text's Adler-32

    @property
    def text(self) -> bytes:
        return zlib.decompress(self._packed)

    def blocks(self) -> Iterator[bytes]:
        unpacker, rest = zlib.decompressobj(), self._packed
        while rest:
            yield unpacker.decompress(rest, _PIECE_NBYTES)
            rest = unpacker.unconsumed_tail
        if last := unpacker.flush():
            yield last

    def as_json(self) -> Iterator[bytes]:
        """Yield the text as a JSON string, in pieces."""
        decoder = getincrementaldecoder("utf-8")()
        yield b'"'
        for block in self.blocks():
            yield json.dumps(decoder.decode(block))[1:-1].encode()
        yield json.dumps(decoder.decode(b"", final=True))[1:-1].encode() + b'"'


@dataclass(frozen=True, slots=True, init=False)
class RecordedShard:
    """One shard of the original checkpoint: its name and the JSON text of its header."""

    name: str
    header_text: KeptText

    def __init__(self, name: str, header: str | bytes) -> None:
        object.__setattr__(self, "name", name)
        raw = header.encode() if isinstance(header, str) else header
        object.__setattr__(self, "header_text", KeptText(raw))

    @property
    def digest(self) -> str:
        """As `Header.digest`, without parsing."""
        text = self.header_text.text
        return digest_pieces((len(text).to_bytes(8, "little"), text))

    @property
    def header(self) -> Header:
        """The header, parsed on each access, so that not all tables are in memory."""
        return self.header_of({})

    def header_of(self, names: Mapping[str, str]) -> Header:
        """Return the header, with names as `parse_header`."""
        return parse_header(self.header_text.text, data_nbytes=None, where=f"source.json: {self.name}", names=names)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """The original checkpoint's shards in order, and its index as written.

    `dropped` names the tensors of these headers that `--drop` left out.
    """

    shards: tuple[RecordedShard, ...]
    index: KeptText | None = None
    dropped: tuple[str, ...] = field(default=())

    def stored(self, where: str) -> StoredTensors:
        """Return the names and shapes of the tensors that were not left behind."""
        entries = (entry for shard in self.shards for entry in shard.header.tensors)
        gone = set(self.dropped)
        return StoredTensors(
            tensors={entry.name: entry.shape for entry in entries if entry.name not in gone}, where=where
        )


def record_blocks(record: SourceRecord) -> Iterator[bytes]:
    """Yield the text of source.json in pieces."""
    yield _BEGIN
    for number, shard in enumerate(record.shards):
        yield f'{"," if number else ""}\n  {{\n   "name": {json.dumps(shard.name)},\n   "header": '.encode()
        yield from shard.header_text.as_json()
        yield b"\n  }"
    yield b'%b],\n "index": ' % (b"\n " if record.shards else b"")
    if record.index is None:
        yield b"null"
    else:
        yield from record.index.as_json()
    dropped = json.dumps(list(record.dropped), indent=1).replace("\n", "\n ")
    yield f',\n "dropped": {dropped}\n}}\n'.encode()


def read_record(file: InputFile, digest: str | None = None) -> SourceRecord:
    """Read source.json, a block at a time, and check its digest if one is passed.

    Raises:
        ManifestError: not a valid source.json, or another version.
        SourceError: it is too large, or has another digest.
        InputError: it cannot be read.
    """
    is_short = file.nbytes <= MAX_WHOLE_NBYTES
    record = _read_usual(bytes(block) for block in Blocks(file, digest)) if is_short else None
    if record is None:  # refused, or formatted otherwise
        return decode_record(read_whole(file, digest), str(file))
    _check_names(record, str(file))
    return record


def decode_record(text: bytes, where: str = "source.json") -> SourceRecord:
    """Read the text of source.json.

    Raises:
        ManifestError: not a valid source.json, or another version.
    """
    record = _read_usual((text,)) or _read_json(text, where)
    _check_names(record, where)
    return record


def _read_usual(blocks: Iterable[bytes]) -> SourceRecord | None:
    """Read a text as `record_blocks` writes it, in pieces: it may be of 300 MB. None: it is formatted otherwise."""
    rest, shards = _Text(blocks), list[RecordedShard]()
    try:
        rest.expect(_BEGIN)
        while rest.skip(b",\n  {" if shards else b"\n  {"):
            rest.expect(b'\n   "name": ')
            name = b"".join(rest.string()).decode()
            rest.expect(b',\n   "header": ')
            shards.append(RecordedShard(name, b"".join(rest.string())))
            rest.expect(b"\n  }")
        rest.expect(b'\n ],\n "index": ' if shards else b'],\n "index": ')
        index = None if rest.skip(b"null") else KeptText(rest.string())
        rest.expect(b',\n "dropped": ')
        fields = parse_json_object(b'{"dropped": %b' % rest.rest(), "source.json")
    except (ValueError, InputError):
        return None
    dropped = fields["dropped"]
    if (
        fields.keys() != {"dropped"}
        or not isinstance(dropped, list)
        or not all(isinstance(name, str) for name in dropped)
    ):
        return None
    return SourceRecord(shards=tuple(shards), index=index, dropped=tuple(dropped))


class _Text:
    """A JSON text in blocks, read from front to back; raises ValueError where it is not as expected."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks, self._block, self._at = iter(blocks), b"", 0

    def rest(self) -> bytes:
        return b"".join((self._block[self._at :], *self._blocks))

    def skip(self, expected: bytes) -> bool:
        while len(self._block) - self._at < len(expected) and self._read_more():
            pass
        is_next = self._block.startswith(expected, self._at)
        self._at += len(expected) if is_next else 0
        return is_next

    def _read_more(self) -> bool:
        """Append the next block to what is left; return whether there was one."""
        following = next(self._blocks, None)
        if following is None:
            return False
        self._block, self._at = self._block[self._at :] + following, 0
        return True

    def expect(self, expected: bytes) -> None:
        if not self.skip(expected):
            raise ValueError

    def string(self) -> Iterator[bytes]:
        """Yield an ASCII string's characters in UTF-8, in pieces."""
        self.expect(b'"')
        while not self.skip(b'"'):
            match = _CHARACTERS.match(self._block, self._at)
            if match is None:
                if not self._read_more():  # else an escape may end in the next block
                    raise ValueError
                continue
            self._at = match.end()
            piece: str = json.loads(b'"%b"' % match[0])
            yield piece.encode()


def _read_json(text: bytes, where: str) -> SourceRecord:
    document = parse_json_object(text, where)
    version = document.get("version")
    if document.get("format") != _FORMAT or type(version) is not int or version != _VERSION:
        raise ManifestError(
            where, f"expected format {_FORMAT!r}, version {_VERSION}", code="manifest.bad-source-record"
        )
    if unknown := sorted(document.keys() - _FIELDS):
        raise ManifestError(
            f"{where}: {unknown[0]}", f"unknown field in version {_VERSION}", code="manifest.bad-source-record"
        )
    shards, index, dropped = document.get("shards"), document.get("index"), document.get("dropped")
    if not isinstance(shards, list) or not all(_is_shard(shard) for shard in shards):
        raise ManifestError(
            f"{where}: shards",
            "expected a list of objects with name and header, both strings",
            code="manifest.bad-source-record",
        )
    if "index" not in document or not (index is None or isinstance(index, str)):
        raise ManifestError(f"{where}: index", "expected a string or null", code="manifest.bad-source-record")
    if not isinstance(dropped, list) or not all(isinstance(name, str) for name in dropped):
        raise ManifestError(f"{where}: dropped", "expected a list of strings", code="manifest.bad-source-record")
    return SourceRecord(
        shards=tuple(RecordedShard(shard["name"], shard["header"]) for shard in shards),
        index=None if index is None else KeptText(index.encode()),
        dropped=tuple(dropped),
    )


def lay_out_anew(entries: Sequence[TensorEntry], kinds: Mapping[str, TargetTensor]) -> tuple[TensorEntry, ...]:
    """Return the entries of a shard's converted tensors, with headers and data in the same order as before.

    `kinds` maps each name to the converted name, dtype and shape; other tensors are left out.
    """
    remaining = [entry for entry in entries if entry.name in kinds]
    in_data_order = sorted(remaining, key=lambda entry: (entry.begin, entry.end))
    placed = {entry.name: entry for entry in layout_tensors(kinds[entry.name] for entry in in_data_order)}
    return tuple(placed[kinds[entry.name][0]] for entry in remaining)


def index_anew(before: KeptText | None, shards: Mapping[str, Sequence[TensorEntry]]) -> KeptText:
    """Return an index for converted tensors, by shard, formatted as transformers does.

    The count of parameters, which transformers 5 writes, is removed if tensors are left out.
    """
    index = {} if before is None else parse_json_object(before.text, INDEX_NAME)
    metadata, weight_map = index.get("metadata"), index.get("weight_map")
    total = sum(entry.nbytes for entries in shards.values() for entry in entries)
    index["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": total}
    index["weight_map"] = {entry.name: name for name, entries in shards.items() for entry in entries}
    if not isinstance(weight_map, dict) or weight_map.keys() != index["weight_map"].keys():
        index["metadata"].pop("total_parameters", None)
    return KeptText((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def new_header_text(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the text of a new header, as the safetensors library writes it."""
    return encode_header(entries, metadata, alignment=_HF_ALIGNMENT)[LENGTH_NBYTES:]


def shard_anew(name: str, tensors: Iterable[TensorAt]) -> RecordedShard:
    """Return the safetensors file that an export writes of tensors that the source has in a file of another format."""
    entries = layout_tensors((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    return RecordedShard(name, new_header_text(entries, {"format": "pt"}))


def record_anew(tensors: Iterable[TensorAt], dropped: tuple[str, ...] = ()) -> SourceRecord:
    """Return the record of a source of another format: files of at most 5 GiB, or of one tensor, in order."""
    groups = list(split_by_size(tensors, lambda tensor: tensor.nbytes, _MAX_SHARD_NBYTES)) or [[]]
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}" for number in range(1, count + 1)] if count > 1 else ["model"]
    shards = tuple(shard_anew(name + SUFFIX, group) for name, group in zip(names, groups, strict=True))
    return SourceRecord(shards=shards, index=index_of(shards) if count > 1 else None, dropped=dropped)


def index_of(shards: Iterable[RecordedShard]) -> KeptText:
    return index_anew(None, {shard.name: shard.header.tensors for shard in shards})


def _check_names(record: SourceRecord, where: str) -> None:
    """Raise if a file would be written twice or outside its folder, or a tensor is in two files."""
    names: set[str] = set()
    tensors: set[str] = set()
    for position, shard in enumerate(record.shards):
        place = f"{where}: shards[{position}]"
        if problem := problem_with_path(shard.name):
            raise ManifestError(f"{place}.name", problem, code="manifest.bad-source-record")
        if not shard.name.endswith(SUFFIX) or shard.name in names:
            raise ManifestError(
                f"{place}.name",
                f"expected a unique {SUFFIX} file name, found {shard.name!r}",
                code="manifest.bad-source-record",
            )
        names.add(shard.name)
        for name in shard.header.tensors.names:
            if name in tensors:
                raise ManifestError(f"{place}.header: {name!r}", "is in two shards", code="manifest.bad-source-record")
            tensors.add(name)
    if unknown := sorted(set(record.dropped) - tensors):
        raise ManifestError(f"{where}: dropped", f"{unknown[0]!r} is in no shard", code="manifest.bad-source-record")


def _is_shard(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("header"), str)
        and value.keys() == {"name", "header"}
    )
