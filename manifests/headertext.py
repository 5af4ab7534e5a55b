"""Read a safetensors header's JSON text tensor by tensor, without building an object graph of all of it.

Memory: the text, and the names and 24 bytes per tensor, where an object of each tensor would take 180. Anything unusual
is left to the strict JSON parser, which reports what is wrong with it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import overload

METADATA = "__metadata__"
MAX_DIM = 1 << 63
MAX_RANK = 64  # dimensions of a tensor; the limit of torch and NumPy
NO_NAMES: Mapping[str, str] = MappingProxyType({})
_MOST_METADATA = 100_000  # strings in `__metadata__`
_MOST_KINDS = 10_000  # cached pairs of dtype and shape

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


_S = rb"[ \t\n\r]*+"  # JSON white space; possessive, to rule out backtracking
STRING = rb'"((?:[^"\\\x00-\x1f]++|\\.)*+)"'
_COUNT = rb"(?:0|[1-9][0-9]{0,18})"
_LIST = rb"\[([0-9, \t\n\r]*+)\]"
_COLON, _COMMA = _S + rb":" + _S, _S + rb"," + _S
_NEXT = _S + rb"([,}])" + _S
_TENSOR = re.compile(
    STRING + _COLON + rb'\{%s"dtype"' % _S + _COLON + rb'"([A-Z0-9_]+)"' + _COMMA
    + rb'"shape"' + _COLON + _LIST + _COMMA + rb'"data_offsets"' + _COLON + _LIST + _S + rb"\}" + _NEXT
)  # fmt: skip
_FIELD = rb'"(dtype|shape|data_offsets)"' + _COLON + rb'(?:"([A-Z0-9_]+)"|' + _LIST + rb")"
_COUNTS = re.compile(_S + rb"(?:" + _COUNT + rb"(?:" + _COMMA + _COUNT + rb")*+)?" + _S)
_OPENED, _EMPTY, _CLOSED = re.compile(_S + rb"\{" + _S), re.compile(_S + rb"\{" + _S + rb"\}"), re.compile(_S + rb"\Z")
_METADATA_OPENED = re.compile(rb'"__metadata__"' + _COLON + rb"\{" + _S + rb"(\}?)" + _S)
PAIR = re.compile(STRING + _COLON + STRING + _NEXT)
_NEXT_AT = re.compile(rb"([,}])" + _S)


def read_header_text(raw: bytes, names: Mapping[str, str] = NO_NAMES) -> tuple[TensorTable, dict[str, str]] | int:
    """Return the tensors and `__metadata__` of a header's text. Names in `names` are the same objects as there.

    Returns the byte position of the first malformed or unusual part instead, if there is one.
    """
    table = TensorTable()
    metadata: dict[str, str] | None = None
    opened = _OPENED.match(raw)
    if opened is None:
        return 0
    if empty := _EMPTY.match(raw):
        return (table, {}) if _CLOSED.match(raw, empty.end()) else empty.end()
    kinds: dict[tuple[bytes, bytes], TensorKind] = {}
    at = opened.end()
    while True:
        if match := _TENSOR.match(raw, at):
            name, dtype, shape, offsets, following = match.groups()
        elif (opened := _METADATA_OPENED.match(raw, at)) and metadata is None:
            read = _read_metadata(raw, opened)
            if read is None:
                return at
            metadata, after = read
            if (closing := _NEXT_AT.match(raw, after)) is None:
                return after
            at = closing.end()
            if closing[1] == b"}":
                break
            continue
        elif (match := _in_any_order().match(raw, at)) and (fields := _sorted_fields(match)):
            name, (dtype, shape, offsets), following = match[1], fields, match[11]
        else:
            return at
        fqn, kind = read_string(name), _kind_of(dtype, shape, kinds)
        begin = None if kind is None else _begin_of(offsets, kind)
        if fqn is None or fqn == METADATA or kind is None or begin is None:
            return at
        table.append(names.get(fqn, fqn), kind, begin)
        at = match.end()
        if following == b"}":
            break
    if _CLOSED.match(raw, at) is None:
        return at
    return at if len(set(table.names)) < len(table) else (table, metadata or {})


def read_string(text: bytes) -> str | None:
    """Decode a JSON string, passed without its quotes; None if it is not valid Unicode."""
    try:
        if b"\\" not in text:
            return text.decode()
        string: str = json.loads(b'"%s"' % text)
        string.encode()
    except ValueError:  # a UnicodeError or a JSONDecodeError
        return None
    return string


def _begin_of(offsets: bytes, kind: TensorKind) -> int | None:
    """Return where a tensor begins; None unless these are two offsets that fit its kind."""
    first, comma, second = offsets.partition(b",")
    if _COUNTS.fullmatch(offsets) is None or not comma or b"," in second:
        return None
    begin, end = int(first), int(second)
    return begin if end - begin == kind[2] and end < MAX_DIM else None


def _kind_of(dtype: bytes, shape: bytes, kinds: dict[tuple[bytes, bytes], TensorKind]) -> TensorKind | None:
    """Return dtype, shape and bytes; tensors of one kind share the objects."""
    if kind_before := kinds.get((dtype, shape)):
        return kind_before
    name = _NAMES.get(dtype)
    if name is None or shape.count(b",") >= MAX_RANK or _COUNTS.fullmatch(shape) is None:
        return None
    dims = tuple(map(int, shape.split(b","))) if shape.strip() else ()
    bits = prod(dims) * DTYPE_BITS[name]
    if max(dims, default=0) >= MAX_DIM or prod(filter(None, dims)) * DTYPE_BITS[name] >= MAX_DIM or bits % 8:
        return None
    if len(kinds) == _MOST_KINDS:
        kinds.clear()
    kinds[dtype, shape] = kind = (name, dims, bits // 8)
    return kind


def _sorted_fields(match: re.Match[bytes]) -> tuple[bytes, bytes, bytes] | None:
    """Return dtype, shape and offsets if each occurs once and has the right type."""
    texts = {match[number]: match[number + 1] for number in (2, 5, 8)}
    lists = {match[number]: match[number + 2] for number in (2, 5, 8)}
    dtype, shape, offsets = texts.get(b"dtype"), lists.get(b"shape"), lists.get(b"data_offsets")
    return None if dtype is None or shape is None or offsets is None else (dtype, shape, offsets)


def _read_metadata(raw: bytes, opened: re.Match[bytes]) -> tuple[dict[str, str], int] | None:
    """Return `__metadata__` and the position after it; None if it is not an object of strings with unique keys."""
    metadata: dict[str, str] = {}
    at, following = opened.end(), opened[1]
    while following != b"}":
        match = PAIR.match(raw, at)
        if match is None or len(metadata) == _MOST_METADATA:
            return None
        key, value = read_string(match[1]), read_string(match[2])
        if key is None or value is None or key in metadata:
            return None
        metadata[key] = value
        at, following = match.end(), match[3]
    return metadata, at


_NAMES = {name.encode(): name for name in DTYPE_BITS}


@cache
def _in_any_order() -> re.Pattern[bytes]:
    return re.compile(STRING + _COLON + rb"\{" + _S + _COMMA.join([_FIELD] * 3) + _S + rb"\}" + _NEXT)


TensorKind = tuple[str, tuple[int, ...], int]  # dtype, shape, bytes


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


class TensorTable(Sequence[TensorEntry]):
    """A shard's tensors, in header order. An entry is made when it is asked for."""

    __slots__ = ("_begins", "_kinds", "_names", "end", "is_adjacent", "is_ordered")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._kinds: list[TensorKind] = []  # tensors of one kind share the object
        self._begins = array("Q")
        self.end = 0  # of the tensor that reaches furthest
        self.is_ordered = True  # whether no tensor begins before the end of the one before it
        self.is_adjacent = True  # whether each begins there, and the first at 0

    def append(self, name: str, kind: TensorKind, begin: int) -> None:
        self._names.append(name)
        self._kinds.append(kind)
        self._begins.append(begin)
        if begin != self.end:
            self.is_adjacent = False
            self.is_ordered = self.is_ordered and begin > self.end
        self.end = max(self.end, begin + kind[2])

    @property
    def names(self) -> Sequence[str]:
        return self._names

    def rows(self) -> Iterator[tuple[int, str, TensorKind, int]]:
        """Yield each tensor by its offset: its number in the header, name, kind and offset."""
        names, kinds, begins = self._names, self._kinds, self._begins
        if self.is_ordered:
            yield from zip(range(len(names)), names, kinds, begins, strict=True)
            return
        for number in sorted(range(len(names)), key=lambda number: (begins[number], begins[number] + kinds[number][2])):
            yield number, names[number], kinds[number], begins[number]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[TensorEntry]:
        for name, (dtype, shape, nbytes), begin in zip(self._names, self._kinds, self._begins, strict=True):
            yield TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=begin + nbytes)

    @overload
    def __getitem__(self, index: int) -> TensorEntry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorEntry]: ...
    def __getitem__(self, index: int | slice) -> TensorEntry | Sequence[TensorEntry]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        dtype, shape, nbytes = self._kinds[index]
        begin = self._begins[index]
        return TensorEntry(name=self._names[index], dtype=dtype, shape=shape, begin=begin, end=begin + nbytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # equal to a tuple, which has another hash
