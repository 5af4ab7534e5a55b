"""Safetensors headers: read with all bounds checked, and written so that the `safetensors` library opens them.

Source: safetensors README, "Format", v0.8.0; dtypes and their widths from its `Dtype` enum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

from manifests.digest import digest_pieces, split_digests
from manifests.errors import ShardError, system_errors
from manifests.jsontext import parse_json_object
from manifests.paths import open_regular

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

ALIGNMENT = 4096  # of the data area in the shards that we write, in bytes
METADATA = "__metadata__"
MAX_DIM = 1 << 63
MAX_RANK = 64  # dimensions of a tensor; the limit of torch and NumPy
DIGESTS_KEY = "blake3"  # in `__metadata__`: hex digests of the tensors, in header order
_DIGEST_CHARS = 64
_BLANK = "0" * _DIGEST_CHARS
LENGTH_NBYTES = 8  # of a file: the length of its header's JSON text
MAX_HEADER_NBYTES = 100_000_000  # of its JSON text: the limit of the safetensors library

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a shard. `begin` and `end` are byte offsets in the data area."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """A shard's table of tensors, in header order. `raw` is the JSON text of the file."""

    tensors: Sequence[TensorEntry]
    metadata: Mapping[str, str]
    raw: bytes

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.tensors]

    @property
    def nbytes(self) -> int:
        """Where the data area starts, in bytes from the start of the file."""
        return LENGTH_NBYTES + len(self.raw)

    @property
    def digest(self) -> str:
        """The shard's digest: BLAKE3 of the file up to the data area.

        The header contains every tensor's digest, so it verifies the data too (docs/adr/0002).
        """
        return digest_pieces((len(self.raw).to_bytes(LENGTH_NBYTES, "little"), self.raw))

    def digests(self, where: str) -> dict[str, str]:
        """Return each tensor's hex digest; raises as `digest_table`."""
        return dict(zip(self.names, self.digest_table(where), strict=True))

    def digest_table(self, where: str) -> list[str]:
        """Return the tensors' hex digests, in header order.

        Raises:
            ShardError: the header does not have one digest per tensor.
        """
        text = self.metadata.get(DIGESTS_KEY, "") if self.tensors else ""
        digests = split_digests(text)
        if digests is None or len(digests) != len(self.tensors):
            num_found = text.count(" ") + 1
            raise ShardError(
                f"{where}: __metadata__.{DIGESTS_KEY}",
                f"expected {len(self.tensors)} digests of {_DIGEST_CHARS} hex digits, found {num_found} words",
                "this shard was not written by reshard; pack the model again",
                code="header.no-digests",
            )
        return digests


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        ShardError: not a safetensors file, truncated, or its header does not match the data.
        SourceError: the header is not a JSON object.
        InputError: the file cannot be read.
    """
    place = str(path)
    with system_errors(place, code="store.unreadable"), open(path, "rb", opener=open_regular) as file:
        file_nbytes = os.fstat(file.fileno()).st_size
        raw_nbytes = header_nbytes(file.read(LENGTH_NBYTES), file_nbytes, place)
        raw = file.read(raw_nbytes)
    if len(raw) != raw_nbytes:
        problem = f"truncated header: expected {raw_nbytes} bytes, found {len(raw)}"
        raise ShardError(place, problem, code="header.not-safetensors")
    return parse_header(raw, data_nbytes=file_nbytes - LENGTH_NBYTES - raw_nbytes, where=place)


def header_nbytes(first: bytes, file_nbytes: int, where: str) -> int:
    """Return the length of the header's JSON text from the first 8 bytes of a file of `file_nbytes`."""
    if len(first) < LENGTH_NBYTES:
        raise ShardError(
            where,
            f"expected at least {LENGTH_NBYTES} bytes, found {len(first)}",
            _NOT_SAFETENSORS,
            code="header.not-safetensors",
        )
    if first == b"version ":
        hint = "git lfs pull downloads the files of a clone; or download them: hf download org/name"
        raise ShardError(where, "is a pointer of Git LFS, not the file itself", hint, code="header.git-lfs")
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


def parse_header(raw: bytes, *, data_nbytes: int | None, where: str) -> Header:
    """Parse a header's JSON text and check it against the `data_nbytes` that follow it in the file.

    If `data_nbytes` is None (a header without its file), the data may have any length.

    Raises:
        SourceError: not a JSON object (see `parse_json_object`).
        ShardError: a field is missing or of the wrong type; offsets overlap, leave a gap, do not match dtype and
            shape, or do not end where the file ends.
    """
    document = parse_json_object(raw, f"{where}: header")
    metadata = _metadata(document.pop(METADATA, {}), where)
    tensors = tuple(_entry(name, fields, where) for name, fields in document.items())
    _check_offsets(tensors, data_nbytes, where)
    return Header(tensors=tensors, metadata=metadata, raw=raw)


def in_data_order(entries: Sequence[TensorEntry]) -> Sequence[TensorEntry]:
    """Return the tensors ordered by offset, without a copy if they already are."""
    if all(entry.end <= following.begin for entry, following in pairwise(entries)):
        return entries
    return sorted(entries, key=lambda entry: (entry.begin, entry.end))


def layout_tensors(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorEntry, ...]:
    """Assign adjacent offsets to (name, dtype, shape)."""
    entries, begin = [], 0
    for name, dtype, shape in tensors:
        end = begin + nbytes_of(dtype, shape)
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
        begin = end
    return tuple(entries)


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes; sub-byte dtypes must fill whole bytes."""
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} {list(shape)} does not fill whole bytes")
    return bits // 8


def encode_header(tensors: Iterable[TensorEntry], metadata: Mapping[str, str], *, alignment: int = ALIGNMENT) -> bytes:
    """Return the bytes of a file before its data area: length, JSON text, padding up to `alignment`."""
    fields = [f'"{METADATA}":{_encode(dict(metadata))}'] if metadata else []
    text = f"{{{','.join((*fields, *map(_field, tensors)))}}}".encode()
    text += b" " * (-(LENGTH_NBYTES + len(text)) % alignment)
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text


def _field(entry: TensorEntry) -> str:
    """Return a member of a header's JSON object, formatted directly: faster than `json` for 100,000 tensors."""
    return (
        f'{_encode(entry.name)}:{{"dtype":"{entry.dtype}","shape":[{",".join(map(str, entry.shape))}],'
        f'"data_offsets":[{entry.begin},{entry.end}]}}'
    )


def header_template(
    tensors: Sequence[TensorEntry], metadata: Mapping[str, str], digests: Mapping[str, str] | None = None
) -> bytes:
    """Return a shard's header with its tensors' hex digests, or zeros while they are unknown.

    Digests have a fixed width, so the template and the final header have the same length, and the data can be
    written first.
    """
    words = " ".join(_BLANK if digests is None else digests[entry.name] for entry in tensors)
    return encode_header(tensors, {"format": "pt", **metadata, DIGESTS_KEY: words})


_NOT_SAFETENSORS = "the file is damaged or not a safetensors file; download it again"


def _metadata(found: object, where: str) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ShardError(f"{where}: __metadata__", "expected an object of strings", code="header.invalid-field")
    return found


def _entry(name: str, fields: object, where: str) -> TensorEntry:
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
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])


def _are_counts(found: object) -> bool:
    return isinstance(found, list) and len(found) <= MAX_RANK and all(map(_is_count, found))


def _is_count(found: object) -> bool:
    return type(found) is int and 0 <= found < MAX_DIM


def _check_offsets(tensors: Sequence[TensorEntry], data_nbytes: int | None, where: str) -> None:
    position = 0
    for entry in in_data_order(tensors):
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
