"""Safetensors headers: read with all bounds checked, and written so that the `safetensors` library opens them.

Source: safetensors README, "Format", v0.8.0; dtypes and their widths from its `Dtype` enum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise, repeat
from math import prod
from pathlib import Path

from manifests.digest import DigestTable, digest_pieces
from manifests.errors import ShardError, refused_by_system
from manifests.headertext import (
    DTYPE_BITS,
    MAX_DIM,
    MAX_RANK,
    METADATA,
    NO_NAMES,
    TensorEntry,
    TensorKind,
    TensorTable,
    read_header_text,
)
from manifests.jsontext import parse_json_object
from manifests.paths import open_regular

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

ALIGNMENT = 4096  # of the data area in the shards that we write, in bytes
DIGESTS_KEY = "blake3"  # in `__metadata__`: hex digests of the tensors, in header order
_DIGEST_CHARS = 64
_BLANK = "0" * _DIGEST_CHARS
_TEXTS_IN_BLOCK = 4096  # of a header that is written in blocks
LENGTH_NBYTES = 8  # of a file: the length of its header's JSON text
MAX_HEADER_NBYTES = 100_000_000  # of its JSON text: the limit of the safetensors library


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """A shard's table of tensors, in header order. `raw` is the JSON text of the file."""

    tensors: TensorTable
    metadata: Mapping[str, str]
    raw: bytes

    @property
    def nbytes(self) -> int:
        """Where the data area starts, in bytes from the start of the file."""
        return LENGTH_NBYTES + len(self.raw)

    @property
    def data_nbytes(self) -> int:
        return self.tensors.end

    @property
    def digest(self) -> str:
        """The shard's digest: BLAKE3 of the file up to the data area.

        The header contains every tensor's digest, so it verifies the data too (docs/adr/0002).
        """
        return digest_pieces((len(self.raw).to_bytes(LENGTH_NBYTES, "little"), self.raw))

    def digests(self, where: str) -> dict[str, str]:
        """Return each tensor's hex digest; raises as `digest_table`."""
        return dict(zip(self.tensors.names, self.digest_table(where), strict=True))

    def digest_table(self, where: str) -> DigestTable:
        """Return the tensors' digests, in header order.

        Raises:
            ShardError: the header does not have one digest per tensor.
        """
        text = self.metadata.get(DIGESTS_KEY, "") if self.tensors else ""
        found = DigestTable.read(text)
        if found is None or len(found) != len(self.tensors):
            num_found = text.count(" ") + 1
            raise ShardError(
                f"{where}: __metadata__.{DIGESTS_KEY}",
                f"expected {len(self.tensors)} digests of {_DIGEST_CHARS} hex digits, found {num_found} words",
                "this shard was not written by reshard; pack the model again",
                code="header.no-digests",
            )
        return found


def read_header(path: Path, *, where: str | None = None, names: Mapping[str, str] = NO_NAMES) -> Header:
    """Read and check the header of a safetensors file, with names as `parse_header`.

    Raises:
        ShardError: not a safetensors file, truncated, or its header does not match the data.
        SourceError: the header is not a JSON object.
        InputError: the file cannot be read.
    """
    place = where or str(path)
    try:
        with open(path, "rb", opener=open_regular) as file:
            file_nbytes = os.fstat(file.fileno()).st_size
            raw_nbytes = header_nbytes(file.read(LENGTH_NBYTES), file_nbytes, place)
            raw = file.read(raw_nbytes)
    except OSError as error:
        raise refused_by_system(place, error, code="store.unreadable") from error
    if len(raw) != raw_nbytes:
        problem = f"truncated header: expected {raw_nbytes} bytes, found {len(raw)}"
        raise ShardError(place, problem, code="header.not-safetensors")
    return parse_header(raw, data_nbytes=file_nbytes - LENGTH_NBYTES - raw_nbytes, where=place, names=names)


def header_nbytes(first: bytes, file_nbytes: int, where: str) -> int:
    """Return the length of the header's JSON text from the first 8 bytes of a file of `file_nbytes`."""
    if len(first) < LENGTH_NBYTES:
        raise ShardError(
            where,
            f"expected at least {LENGTH_NBYTES} bytes, found {len(first)}",
            _NOT_SAFETENSORS,
            code="header.not-safetensors",
        )
    length = int.from_bytes(first, "little")
    most = min(MAX_HEADER_NBYTES, file_nbytes - LENGTH_NBYTES)
    if length > most:
        raise ShardError(
            where,
            f"expected a header of at most {most} bytes, found {length}",
            _NOT_SAFETENSORS,
            code="header.not-safetensors",
        )
    return length


def parse_header(raw: bytes, *, data_nbytes: int | None, where: str, names: Mapping[str, str] = NO_NAMES) -> Header:
    """Parse a header's JSON text and check it against the `data_nbytes` that follow it in the file.

    If `data_nbytes` is None (a header without its file), the data may have any length. Names in `names` are the same
    objects as there: a million names take 100 MB.

    Raises:
        SourceError: not a JSON object (see `parse_json_object`).
        ShardError: a field is missing or of the wrong type; offsets overlap, leave a gap, do not match dtype and
            shape, or do not end where the file ends.
    """
    read = read_header_text(raw, names)
    if isinstance(read, int):
        document = parse_json_object(raw, f"{where}: header")  # raises if it is malformed
        metadata, table = _metadata(document.pop(METADATA, {}), where), TensorTable()
        for name, fields in document.items():
            table.append(names.get(name, name), *_kind_and_begin(name, fields, where))
    else:
        table, metadata = read
    _check_offsets(table, data_nbytes, where)
    return Header(tensors=table, metadata=metadata, raw=raw)


def in_data_order(entries: Sequence[TensorEntry]) -> Sequence[TensorEntry]:
    """Return the tensors ordered by offset, without a copy if they already are."""
    if isinstance(entries, TensorTable):
        is_ordered = entries.is_ordered
    else:
        is_ordered = all(one.end <= other.begin for one, other in pairwise(entries))
    if is_ordered:
        return entries
    return sorted(entries, key=lambda entry: (entry.begin, entry.end))


def layout_tensors(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorEntry, ...]:
    """Assign adjacent offsets to (name, dtype, shape)."""
    return tuple(_laid_out(tensors))


def _laid_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Iterator[TensorEntry]:
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + nbytes_of(dtype, shape)
        yield TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end)
        begin = end


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes; sub-byte dtypes must fill whole bytes."""
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} {list(shape)} does not fill whole bytes")
    return bits // 8


def encode_header(tensors: Iterable[TensorEntry], metadata: Mapping[str, str], *, alignment: int = ALIGNMENT) -> bytes:
    """Return the bytes of a file before its data area: length, JSON text, padding up to `alignment`."""
    fields = _fields(tensors, metadata)
    text = f"{{{','.join(fields)}}}".encode()
    text += b" " * (-(LENGTH_NBYTES + len(text)) % alignment)
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text


def _fields(tensors: Iterable[TensorEntry], metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield the members of a header's JSON object, formatted directly: faster than `json` for 100,000 tensors."""
    if metadata:
        yield f'"{METADATA}":{_encode(dict(metadata))}'
    yield from map(_field, tensors)


def _field(entry: TensorEntry) -> str:
    return (
        f'{_encode(entry.name)}:{{"dtype":"{entry.dtype}","shape":[{",".join(map(str, entry.shape))}],'
        f'"data_offsets":[{entry.begin},{entry.end}]}}'
    )


def template_nbytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> int:
    """Return the length of `header_template` for tensors laid out by `layout_tensors`, without storing them."""
    num_tensors, text_nbytes = -1, 1  # the first field is `__metadata__`
    for field in _fields(_laid_out(tensors), {"format": "pt", **metadata, DIGESTS_KEY: ""}):
        num_tensors += 1
        text_nbytes += 1 + (len(field) if field.isascii() else len(field.encode()))  # and a brace or comma
    text_nbytes += max(0, num_tensors * (_DIGEST_CHARS + 1) - 1)
    return LENGTH_NBYTES + text_nbytes + -(LENGTH_NBYTES + text_nbytes) % ALIGNMENT


def header_template(
    tensors: tuple[TensorEntry, ...], metadata: Mapping[str, str], digests: Mapping[str, str] | None = None
) -> bytes:
    """Return a shard's header with its tensors' hex digests, or zeros while they are unknown.

    Digests have a fixed width, so the template and the final header have the same length, and the data can be
    written first.
    """
    words = " ".join(_BLANK if digests is None else digests[entry.name] for entry in tensors)
    return encode_header(tensors, {"format": "pt", **metadata, DIGESTS_KEY: words})


def template_blocks(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    digests: Iterable[str],
    *,
    nbytes: int,
) -> Iterator[bytes]:
    """Yield the `nbytes` of `header_template` in blocks; the digests are in the order of the tensors."""
    yield (nbytes - LENGTH_NBYTES).to_bytes(LENGTH_NBYTES, "little")
    begun = _encode({"format": "pt", **metadata, DIGESTS_KEY: ""}).removesuffix('"}')
    fields = (f",{_field(entry)}" for entry in _laid_out(tensors))
    left = nbytes - LENGTH_NBYTES
    texts = chain((f'{{"{METADATA}":{begun}',), _spaced(digests), ('"}',), fields, ("}",))
    for block in _joined(texts):
        left -= len(block)
        yield block
    assert 0 <= left < ALIGNMENT, "the length of a template is known before it is made"
    yield b" " * left


def blank_digests(num_tensors: int) -> Iterator[str]:
    """Return the digests of a template while they are unknown."""
    return repeat(_BLANK, num_tensors)


def _spaced(words: Iterable[str]) -> Iterator[str]:
    for number, word in enumerate(words):
        yield f" {word}" if number else word


def _joined(texts: Iterable[str]) -> Iterator[bytes]:
    """Encode texts, many at a time."""
    left = iter(texts)
    while some := "".join(islice(left, _TEXTS_IN_BLOCK)):
        yield some.encode()


_NOT_SAFETENSORS = "the file is damaged or not a safetensors file; download it again"


def _metadata(found: object, where: str) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ShardError(f"{where}: __metadata__", "expected an object of strings", code="header.invalid-field")
    return found


def _kind_and_begin(name: str, fields: object, where: str) -> tuple[TensorKind, int]:
    place = f"{where}: {name!r}"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise ShardError(place, "expected an object with dtype, shape and data_offsets", code="header.invalid-field")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        hint = "known dtypes: " + ", ".join(sorted(DTYPE_BITS))
        raise ShardError(f"{place}.dtype", f"unknown dtype {dtype!r}", hint, code="header.unknown-dtype")
    if not _are_counts(shape):
        problem = f"expected a list of counts, found {str(shape)[:80]}"
        raise ShardError(f"{place}.shape", problem, code="header.invalid-field")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        problem = f"expected [begin, end], found {str(offsets)[:80]}"
        raise ShardError(f"{place}.data_offsets", problem, code="header.invalid-field")
    if prod(filter(None, shape)) * DTYPE_BITS[dtype] >= MAX_DIM:
        problem = f"expected fewer than 2^63 bits, found {dtype} {str(shape)[:80]}"
        raise ShardError(f"{place}.shape", problem, code="header.invalid-field")
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        taken = bits / 8 if bits % 8 else bits // 8
        raise ShardError(
            f"{place}.data_offsets",
            f"expected {taken} bytes ({dtype} {str(shape)[:80]}), found {offsets[1] - offsets[0]}",
            code="header.wrong-offsets",
        )
    return (dtype, tuple(shape), offsets[1] - offsets[0]), offsets[0]


def _are_counts(found: object) -> bool:
    return isinstance(found, list) and len(found) <= MAX_RANK and all(map(_is_count, found))


def _is_count(found: object) -> bool:
    return type(found) is int and 0 <= found < MAX_DIM


def _check_offsets(table: TensorTable, data_nbytes: int | None, where: str) -> None:
    position = table.end if table.is_adjacent else 0
    for entry in () if table.is_adjacent else in_data_order(table):
        if entry.begin != position:
            kind = (
                "overlaps the previous tensor" if entry.begin < position else "leaves a gap after the previous tensor"
            )
            raise ShardError(
                f"{where}: {entry.name!r}.data_offsets",
                f"expected begin {position}, found {entry.begin}: {kind}",
                code="header.wrong-offsets",
            )
        position = entry.end
    if data_nbytes is not None and position != data_nbytes:
        kind = "is truncated" if position > data_nbytes else "has bytes outside of any tensor"
        raise ShardError(
            where,
            f"expected {position} bytes of data (header), found {data_nbytes}: the file {kind}",
            "download or copy the file again",
            code="header.wrong-data-length",
        )
