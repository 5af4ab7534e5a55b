"""The parts of a pack: a plan's tensors, distributed over parts that are equal in bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from manifests.errors import UsageError
from manifests.safetensors import ALIGNMENT
from reshard.plans.pack_plan import OutputShard, Traffic
from reshard.tensors.lazy import stored_nbytes

__all__ = ["Part", "PartOfShard", "parse_part", "part_nbytes", "part_traffic", "partition", "shards_of_part"]

T = TypeVar("T")

_MAX_PARTS = 512  # a commit locks a file of each, and many systems limit a process to 1024 open files
_FORM = re.compile(r"([0-9]{1,5})/([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Part `number` of `of`, counted from 1. `command`, with `--part` added, packs it; errors name it."""

    number: int
    of: int
    command: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"part-{self.number:05}-of-{self.of:05}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartOfShard:
    """The tensors of one shard that one part writes; with `has_start`, it also writes the header's template."""

    shard: OutputShard
    names: frozenset[str]
    nbytes: int
    has_start: bool


def parse_part(text: str, command: tuple[str, ...] = ()) -> Part:
    """Read `i/n`; `command` packs the other parts.

    Raises:
        UsageError: it is not of this form, or i is not from 1 to n.
    """
    found = _FORM.fullmatch(text)
    part = Part(number=int(found[1]), of=int(found[2]), command=command) if found else None
    if part is None or not 1 <= part.number <= part.of <= _MAX_PARTS:
        problem = f"expected I/N with I from 1 to N, and N at most {_MAX_PARTS}, found {text[:80]!r}"
        raise UsageError("--part", problem, "write 1/8 to 8/8", code="options.bad-part")
    return part


def partition(shards: Sequence[OutputShard], num_parts: int) -> tuple[tuple[PartOfShard, ...], ...]:
    """Return what each part writes, equal in bytes up to the length of a piece.

    A piece is the tensors between two sector boundaries of a shard: machines that share a file system must not
    write to the same sector of a file, since each may write back the other's bytes as it read them before.
    """
    parts: list[dict[str, list[PartOfShard]]] = [{} for _ in range(num_parts)]
    pieces = [piece for shard in shards for piece in _pieces(shard)]
    for number, piece in _spread(pieces, lambda piece: piece.nbytes, num_parts):
        parts[number].setdefault(piece.shard.path, []).append(piece)
    return tuple(tuple(map(_join, by_shard.values())) for by_shard in parts)


def shards_of_part(shards: Sequence[OutputShard], part: Part) -> tuple[OutputShard, ...]:
    """Return the shards that a part writes where each is written by one process, as an object in a bucket is."""
    spread = _spread(shards, lambda shard: shard.nbytes, part.of)
    return tuple(shard for number, shard in spread if number == part.number - 1)


def _spread(items: Sequence[T], nbytes_of: Callable[[T], int], num_parts: int) -> Iterator[tuple[int, T]]:
    """Yield each item with the part that its middle falls into: neighbors stay together, and reads stay in order."""
    total, before = max(1, sum(map(nbytes_of, items))), 0
    for item in items:
        nbytes = nbytes_of(item)
        yield min(num_parts - 1, (2 * before + nbytes) * num_parts // (2 * total)), item
        before += nbytes


def part_nbytes(shards: Sequence[OutputShard], part: Part) -> int:
    """Return the size of a part's tensors."""
    return sum(piece.nbytes for piece in partition(shards, part.of)[part.number - 1])


def part_traffic(shards: Sequence[OutputShard], part: Part) -> Traffic:
    """Return the bytes that a part reads and writes; a header's template is written with the first tensors after it."""
    written = partition(shards, part.of)[part.number - 1]
    return Traffic(
        once_nbytes=sum(
            stored_nbytes(origin) for piece in written for origin in piece.shard.origins if origin.name in piece.names
        ),
        write_nbytes=sum(piece.nbytes + (piece.shard.header_nbytes if piece.has_start else 0) for piece in written),
    )


def _pieces(shard: OutputShard) -> Iterator[PartOfShard]:
    names: list[str] = []
    begin, is_first, last = shard.header_nbytes, True, len(shard.origins)
    for number, (tensor, position) in enumerate(shard.placed, 1):
        names.append(tensor.name)
        end = position + tensor.nbytes
        if number == last or (end > begin and end % ALIGNMENT == 0):
            yield PartOfShard(shard=shard, names=frozenset(names), nbytes=end - begin, has_start=is_first)
            names, begin, is_first = [], end, False


def _join(pieces: Sequence[PartOfShard]) -> PartOfShard:
    return PartOfShard(
        shard=pieces[0].shard,
        names=frozenset().union(*(piece.names for piece in pieces)),
        nbytes=sum(piece.nbytes for piece in pieces),
        has_start=pieces[0].has_start,
    )
