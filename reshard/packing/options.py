"""The options of a pack, from its callers to the engine, its parts, and its result.

Parts are whole shards, neighbors together, distributed so that parts are similar in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from manifests.brief import brief
from manifests.errors import OutputError, Parameter, UsageError, check_choice, check_count
from manifests.index import MAX_SHARD_NBYTES
from manifests.invariants import MANIFEST_NAME
from manifests.schema import Manifest
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Used
from reshard.packing.hub_sha256 import HubReport
from reshard.packing.plan import LayoutRequest
from reshard.plans.pack_plan import OutputShard
from reshard.transforms.conversion import Conversion
from stores.address import OBJECT_SCHEMES, hub_output, is_url, split_url
from stores.direct_io import Io
from stores.folders.publish import check_not_a_step, check_not_mounted
from stores.open import Address


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions:
    """Where to pack, what and how. `stages` is written as `0-3,7`: the bundles of the others are virtual.

    Without `stages` all are packed, and without a `part` all shards of them.
    """

    out: Address
    layout: LayoutRequest = field(default_factory=LayoutRequest)
    conversion: Conversion = field(default_factory=Conversion)
    drop: Collection[str] = ()
    model: Path | None = None  # the file that describes the source
    virtual: bool = False
    stages: str | None = None
    part: Part | None = None
    force: bool = False
    write: WriteOptions = field(default_factory=WriteOptions)
    verify_source: bool = False  # read also what is not packed, to compare whole hub files
    max_shard_nbytes: int = MAX_SHARD_NBYTES
    init: int | None = None  # the seed of initial weights, for a source without any

    def check(self) -> None:
        """Refuse options that conflict, before a source is opened."""
        if not is_url(self.out):
            check_not_mounted(Path(self.out))
        self.conversion.check()
        check_choice(Parameter("io"), self.write.io, get_args(Io))
        if self.part is not None:
            check_count(Parameter("part"), self.part.of, most=_MAX_PARTS)
            check_count(Parameter("part"), self.part.number, most=self.part.of)
            self.check_divided(Parameter("part"))
        if not self.virtual and self.stages is None:
            return
        parameter, problem = Parameter("virtual" if self.virtual else "stages"), ""
        if self.conversion.changes_bytes:
            problem = "virtual bundles refer to the source's bytes, which cannot be converted"
        elif hub_output(self.out) is not None:
            problem = "virtual bundles refer to the source's bytes, which would not be uploaded"
        if problem:
            raise UsageError(parameter, problem, "pack without it", code="options.conflict")

    def check_divided(self, where: str | Parameter) -> None:
        """Refuse options with which a pack cannot be divided into parts; `where` is the flag or parameter for that."""
        if self.init is not None:
            problem = f"conflicts with {where}: initial weights are written in one place"
            raise UsageError(Parameter("init"), problem, f"pack without {where}", code="options.conflict")
        if self.verify_source:
            problem = f"conflicts with {where}: a part does not read whole files"
            raise UsageError(Parameter("verify_source"), problem, f"pack without {where}", code="options.conflict")
        if self.force and not is_url(self.out):  # in place, too: the commit does not know of what its parts are made
            check_not_a_step(Path(self.out))
        if is_url(self.out):
            out = Parameter("out")
            if split_url(self.out)[0] not in OBJECT_SCHEMES:
                problem = f"needs an {out} in a folder, or a bucket of S3, Google Cloud Storage or Azure"
                raise UsageError(where, problem, "pack into a folder, and copy it", code="options.parts-store")
            if self.force:
                problem = f"conflicts with {where} and an {out} in a bucket"
                hint = f"remove the old output first, or choose another {out}"
                raise UsageError(Parameter("force"), problem, hint, code="options.conflict")
        if self.virtual:
            problem = f"conflicts with {Parameter('virtual', True)}: a virtual pack has no bytes to divide"
            raise UsageError(where, problem, "leave one of the two out", code="options.conflict")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackResult:
    """What was written: the manifest, its address, and which source files were verified against the hub's SHA-256.

    One `part` has no manifest: `commit` writes it once all parts are there.

    Units: `nbytes` and `virtual_nbytes` in bytes.
    """

    out: Address
    committed: Manifest | None = None
    part: Part | None = None
    part_nbytes: int = 0
    hub: HubReport = field(default_factory=HubReport)
    used: Used = field(default_factory=Used)  # threads that copied, and requests that ran at a time

    __repr__ = brief

    @property
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            OutputError: one part was written (`output.missing-parts`).
        """
        if self.committed is None:
            problem, hint = f"part {self.part} alone has no manifest", "commit the parts once all are written"
            raise OutputError(str(self.out), problem, hint, code="output.missing-parts")
        return self.committed

    @property
    def path(self) -> str:
        """The path or URL of manifest.json."""
        if isinstance(self.out, Path):
            return str(self.out / MANIFEST_NAME)
        return f"{self.out.rstrip('/')}/{MANIFEST_NAME}"

    @property
    def num_stages(self) -> int:
        return self.manifest.layout.num_stages

    @property
    def num_ranks(self) -> int:
        return self.manifest.layout.num_ranks

    @property
    def num_tensors(self) -> int:
        return sum(stage.num_tensors for stage in self.manifest.stages)

    @property
    def nbytes(self) -> int:
        """The size of all shards, or of those of the part, in bytes."""
        return self.part_nbytes if self.committed is None else sum(shard.nbytes for shard in self.manifest.shards)

    @property
    def virtual_nbytes(self) -> int:
        """The size of tensors that virtual bundles refer to in the source's files, in bytes."""
        return sum(stage.nbytes for stage in self.manifest.stages if stage.spans)


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
    """Read `i/n`; `command` packs the other parts."""
    match = _FORM.fullmatch(text)
    part = Part(number=int(match[1]), of=int(match[2]), command=command) if match else None
    if part is None or not 1 <= part.number <= part.of <= _MAX_PARTS:
        problem = f"expected I/N with I from 1 to N, found {text[:80]!r}"
        raise UsageError(Parameter("part"), problem, "write 1/8 to 8/8", code="options.bad-part")
    return part


def check_num_parts(where: str | Parameter, num_parts: int, shards: Sequence[OutputShard]) -> None:
    """Refuse more parts than there are shards."""
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
