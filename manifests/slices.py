"""Tensors saved in slices, described in a shard's `__metadata__` in the convention of torch's checkpoints.

Source: `DCP_SHARDING_INFO` in torch/distributed/checkpoint/_hf_utils.py, torch 2.13; `shape` is our addition.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from manifests.errors import ShardError
from manifests.jsontext import parse_json_object
from manifests.safetensors import Header

SLICES_KEY = "DCP_SHARDING_INFO"
_VERSION = ("DCP_VERSION", "1.0")
_OFFSET, _SHAPE = "saved_offsets", "shape"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A rectangular region of a tensor: its offset, its shape, and the shape of the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(begin + count for begin, count in zip(self.offset, self.shape, strict=True))

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the region in the whole tensor."""
        return tuple(map(slice, self.offset, self.end))


def slice_metadata(slices: Mapping[str, Slice]) -> dict[str, str]:
    """Return the `__metadata__` (besides digests) of a shard with these slices, by FQN."""
    table = {fqn: {_OFFSET: list(part.offset), _SHAPE: list(part.whole_shape)} for fqn, part in slices.items()}
    return dict((_VERSION, (SLICES_KEY, json.dumps(table, separators=(",", ":"), ensure_ascii=False))))


def slices_in(header: Header, where: str) -> dict[str, Slice]:
    """Return the slice of each tensor in a shard, by FQN; empty for a shard of whole tensors."""
    text = header.metadata.get(SLICES_KEY)
    if text is None:
        return {}
    where = f"{where}: __metadata__.{SLICES_KEY}"
    table = parse_json_object(text.encode(), where)
    if odd := table.keys() ^ {entry.name for entry in header.tensors}:
        problem = f"expected the names of the shard's tensors, found a mismatch: {min(odd)!r}"
        raise ShardError(where, problem, code="header.invalid-slices")
    slices = {}
    for entry in header.tensors:
        fields, place = table[entry.name], f"{where}: {entry.name!r}"
        if not isinstance(fields, dict) or fields.keys() != {_OFFSET, _SHAPE}:
            raise ShardError(place, f"expected an object with {_OFFSET} and {_SHAPE}", code="header.invalid-slices")
        offset, whole = (_counts(fields[name], len(entry.shape), f"{place}.{name}") for name in (_OFFSET, _SHAPE))
        part = Slice(offset=offset, shape=entry.shape, whole_shape=whole)
        if any(end > most for end, most in zip(part.end, whole, strict=True)):
            problem = f"expected a slice within {list(whole)}, found {_shown(part)}"
            raise ShardError(place, problem, code="header.invalid-slices")
        slices[entry.name] = part
    return slices


def problem_with_slices(slices: Sequence[Slice]) -> str | None:
    """Return why these slices are not exactly one tensor, each element once; None if they are."""
    whole = slices[0].whole_shape
    for part in slices:
        if part.whole_shape != whole:
            return f"expected a slice of {list(whole)} as elsewhere, found one of {list(part.whole_shape)}"
        if prod(part.shape) and any(end > most for end, most in zip(part.end, whole, strict=True)):
            return f"expected a slice within {list(whole)}, found {_shown(part)}"
    for first, second in _overlapping(part for part in slices if prod(part.shape)):
        return f"slices overlap: {_shown(first)} and {_shown(second)}"
    num_elements, expected = sum(prod(part.shape) for part in slices), prod(whole)
    return None if num_elements == expected else f"expected {expected} elements in all slices, found {num_elements}"


def _overlapping(slices: Iterable[Slice]) -> Iterator[tuple[Slice, Slice]]:
    open_: list[Slice] = []  # slices that may overlap the current rows
    for part in sorted(slices, key=lambda part: part.offset):
        if part.offset:
            open_ = [other for other in open_ if other.end[0] > part.offset[0]]
        for other in open_:
            pairs = zip(part.offset, part.end, other.offset, other.end, strict=True)
            if all(begin < other_end and other_begin < end for begin, end, other_begin, other_end in pairs):
                yield other, part
        open_.append(part)


def _counts(value: object, length: int, where: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) != length
        or not all(type(n) is int and 0 <= n < 1 << 63 for n in value)
    ):
        problem = f"expected {length} counts, found {str(value)[:80]}"
        raise ShardError(where, problem, code="header.invalid-slices")
    return tuple(value)


def _shown(part: Slice) -> str:
    return f"{list(part.offset)} to {list(part.end)}"
