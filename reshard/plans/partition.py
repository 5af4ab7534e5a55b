"""Who packs what: the tensors of a plan, dealt to parts that are equal in bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manifests.errors import UsageError
from manifests.safetensors import ALIGNMENT
from reshard.plans.pack_plan import OutputShard, Traffic
from reshard.tensors.lazy import stored_nbytes

__all__ = ["Part", "Share", "deal", "parse_part", "part_nbytes", "part_traffic"]

_MOST_PARTS = 512  # a commit holds a lock of each, and 1024 files is what many systems let a process open
_FORM = re.compile(r"([0-9]{1,5})/([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Part `number` of `of`, counted from 1. `command` packs it when `--part` is added: told to whoever lacks one."""

    number: int
    of: int
    command: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"part-{self.number:05}-of-{self.of:05}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Tensors of one shard that one part writes; `has_start` says that it writes the header's template too."""

    shard: OutputShard
    names: frozenset[str]
    nbytes: int
    has_start: bool


def parse_part(text: str) -> Part:
    """Read `i/n`.

    Raises:
        UsageError: it is no such thing, or i is not from 1 to n.
    """
    found = _FORM.fullmatch(text)
    part = Part(number=int(found[1]), of=int(found[2])) if found else None
    if part is None or not 1 <= part.number <= part.of <= _MOST_PARTS:
        raise UsageError(
            "--part",
            f"expected I/N with I from 1 to N, found {text[:80]!r}",
            "write 1/8 to 8/8",
            code="options.bad-part",
        )
    return part


def deal(shards: Sequence[OutputShard], num_parts: int) -> tuple[tuple[Share, ...], ...]:
    """Give each part its share, equal in bytes but for the length of a piece.

    A piece is the tensors between two sectors' borders of a shard: machines that share a file system must not
    write into one sector of one file, for each may put back the other's bytes as it read them.
    """
    pieces = [piece for shard in shards for piece in _pieces(shard)]
    total, before = max(1, sum(piece.nbytes for piece in pieces)), 0
    dealt: list[dict[str, list[Share]]] = [{} for _ in range(num_parts)]
    for piece in pieces:
        # The part that its middle falls to: neighbours stay together, and reading stays in order.
        mine = dealt[min(num_parts - 1, (2 * before + piece.nbytes) * num_parts // (2 * total))]
        mine.setdefault(piece.shard.path, []).append(piece)
        before += piece.nbytes
    return tuple(tuple(map(_join, shares.values())) for shares in dealt)


def _pieces(shard: OutputShard) -> Iterator[Share]:
    names: list[str] = []
    begin, is_first = 0, True
    entries = sorted(shard.entries, key=lambda entry: (entry.begin, entry.end))
    for number, entry in enumerate(entries, 1):
        names.append(entry.name)
        if number == len(entries) or (entry.end > begin and entry.end % ALIGNMENT == 0):
            yield Share(shard=shard, names=frozenset(names), nbytes=entry.end - begin, has_start=is_first)
            names, begin, is_first = [], entry.end, False


def _join(pieces: Sequence[Share]) -> Share:
    return Share(
        shard=pieces[0].shard,
        names=frozenset().union(*(piece.names for piece in pieces)),
        nbytes=sum(piece.nbytes for piece in pieces),
        has_start=pieces[0].has_start,
    )


def part_nbytes(shards: Sequence[OutputShard], part: Part) -> int:
    """Count the bytes of a part's tensors."""
    return sum(share.nbytes for share in deal(shards, part.of)[part.number - 1])


def part_traffic(shards: Sequence[OutputShard], part: Part) -> Traffic:
    """Count what a part reads and writes; the template of a header is written with the tensors behind it."""
    mine = deal(shards, part.of)[part.number - 1]
    return Traffic(
        once_nbytes=sum(
            stored_nbytes(origin) for share in mine for origin in share.shard.origins if origin.name in share.names
        ),
        write_nbytes=sum(share.nbytes + (share.shard.header_nbytes if share.has_start else 0) for share in mine),
    )
