"""The parts of a pack: whole shards, neighbors together, distributed so that parts are similar in bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manifests.errors import Parameter, UsageError
from reshard.plans.pack_plan import OutputShard

_MAX_PARTS = 99_999
_FORM = re.compile(r"([0-9]{1,5})/([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Part `number` of `of`, counted from 1. `command`, with `--part` added, packs it; errors name it."""

    number: int
    of: int
    command: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def name(self) -> str:
        return f"part-{self.number:05}-of-{self.of:05}"


def parse_part(text: str, command: tuple[str, ...] = ()) -> Part:
    """Read `i/n`; `command` packs the other parts.

    Raises:
        UsageError: it is not of this form, or i is not from 1 to n.
    """
    match = _FORM.fullmatch(text)
    part = Part(number=int(match[1]), of=int(match[2]), command=command) if match else None
    if part is None or not 1 <= part.number <= part.of <= _MAX_PARTS:
        problem = f"expected I/N with I from 1 to N, found {text[:80]!r}"
        raise UsageError(Parameter("part"), problem, "write 1/8 to 8/8", code="options.bad-part")
    return part


def check_num_parts(where: str | Parameter, num_parts: int, shards: Sequence[OutputShard]) -> None:
    """Refuse more parts than there are shards.

    Raises:
        UsageError: naming the most.
    """
    if num_parts > len(shards):
        problem = f"expected at most {len(shards)} parts, one for each shard, found {num_parts}"
        hint = f"use fewer parts, or a smaller {Parameter('max_shard_nbytes')}"
        raise UsageError(where, problem, hint, code="options.too-many-parts")


def shards_of_part(shards: Sequence[OutputShard], part: Part) -> tuple[OutputShard, ...]:
    """Return the shards that a part writes, at least one if there are as many as parts."""
    return tuple(shard for number, shard in _spread(shards, part.of) if number == part.number)


def _spread(shards: Sequence[OutputShard], num_parts: int) -> Iterator[tuple[int, OutputShard]]:
    """Yield each shard with the number of the part that its middle falls into, in order, so that no part is empty."""
    total, before, last = max(1, sum(shard.nbytes for shard in shards)), 0, 0
    for shards_left, shard in zip(range(len(shards), 0, -1), shards, strict=True):
        by_bytes = (2 * before + shard.nbytes) * num_parts // (2 * total) + 1
        last = min(max(last, by_bytes, num_parts - shards_left + 1), last + 1, num_parts)
        yield last, shard
        before += shard.nbytes
