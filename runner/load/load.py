"""Loading a checkpoint's tensors, from whatever stages store them: each byte is read once, digests are verified."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby

import torch

from manifests.digest import Hasher
from manifests.errors import ShardError
from manifests.index import split_by_size
from manifests.models import ModelShape, module_of
from manifests.schema import WEIGHTS, Holds, Stage
from manifests.slices import Slice
from runner.bundle.verified_read import check_digest
from runner.distributed.watchdog import StallTimer
from runner.load.fill import PinnedBlocks, fill, intersect, ranges_of
from runner.load.verify_parts import PartRead, ToVerify, share_parts, verify_parts
from runner.tensors.local_shard import STORED_DTYPES, Piece, readable_as
from stores.base import InputFile, Range, Reader, merge_ranges
from stores.bundles import Bundles, TensorAt, join_slices
from stores.workers import Take, share_out, threads_for_ranks

_RUN_NBYTES = 64 << 20  # one unit of work of a thread
_MOST_TO_GPU = 8  # threads that copy to a GPU: more wait for each other; bench/results/gpu-load.json


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What one rank read: `nbytes` of tensor data, and `verified_nbytes` more to verify parts, in `load_s` seconds.

    Of `num_parts` stored tensors it read only a part. `num_unverified` have no digest: they are in original files.
    """

    num_tensors: int
    num_parts: int
    nbytes: int
    load_s: float
    verified_nbytes: int = 0
    num_unverified: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a rank reads: with so many threads, whether it hashes what it reads, what stops it, and its progress."""

    num_threads: int = 2
    hashes: bool = True
    stop: threading.Event | None = None
    timer: StallTimer = field(default_factory=StallTimer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """A read of a stored tensor, or part of it, into memory."""

    into: Piece
    at: TensorAt

    @property
    def is_whole(self) -> bool:
        return tuple(self.into.memory.shape) == self.at.shape

    @cached_property
    def region(self) -> Slice:
        """The part as a region of the stored tensor."""
        offset = tuple(begin - stored for begin, stored in zip(self.into.offset, self.at.offset, strict=True))
        return Slice(offset=offset, shape=tuple(self.into.memory.shape), whole_shape=self.at.shape)

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """The byte ranges of the file that are read."""
        if self.is_whole:
            return ((self.at.begin, self.at.end),)
        ranges = ranges_of(self.at.shape, self.region, STORED_DTYPES[self.at.dtype].itemsize)
        return merge_ranges((self.at.begin + begin, self.at.begin + end) for begin, end in ranges)

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


def load_tensors(
    pieces: Iterable[Piece],
    bundles: Bundles,
    shape: ModelShape,
    holds: Holds = WEIGHTS,
    num_ranks: int = 1,
    how: Reading = Reading(),
) -> LoadReport:
    """Read weights, or one kind of optimizer state, into a rank's pieces, in place, and verify them by digests.

    It runs no collectives, and opens only files of the stages that store these FQNs, whichever stages this rank trains.
    If a rank has part of a tensor, only that part is read, from whatever slices are stored, and the tensor once more,
    whole, to verify it. Other floating dtypes are cast. A tied replica that is not stored gets the bytes of its owner.
    `num_ranks` processes of this machine load at the same time, and share its cores, whatever threads `how` has.

    Shapes: as stored; see `manifests.models`.
    """
    started_s, how = time.perf_counter(), replace(how, num_threads=threads_for_ranks(num_ranks))
    report, parts = read_planned(plan_reads(pieces, bundles, shape, holds), how)
    verified_nbytes = verify_planned(share_parts(parts), how)
    return replace(report, verified_nbytes=verified_nbytes, load_s=time.perf_counter() - started_s)


def read_planned(planned: Iterable[Read], how: Reading) -> tuple[LoadReport, list[PartRead]]:
    """Execute planned reads; return those of parts of tensors for `verify_parts`: no digest has been compared yet."""
    started_s = time.perf_counter()
    reads: dict[_Bytes, Read] = {}
    wanted: dict[_Bytes, list[Piece]] = defaultdict(list)  # two tied names may have the same bytes
    for read in planned:
        key = read.at.file, read.at.begin, read.region
        reads.setdefault(key, read)
        wanted[key].append(read.into)
    parts = read_all(list(reads.values()), how)
    for first, *others in wanted.values():
        for other in others:
            other.memory.copy_(first.memory)
    report = LoadReport(
        num_tensors=len({read.at.name for read in reads.values()}),
        num_parts=sum(not read.is_whole for read in reads.values()),
        nbytes=sum(read.nbytes for read in reads.values()),
        load_s=time.perf_counter() - started_s,
        num_unverified=count_unverified(reads.values()),
    )
    return report, parts


def verify_planned(tensors: Sequence[ToVerify], how: Reading) -> int:
    """Read tensors whole as `verify_parts` does, until `how` stops it, while its timer measures the progress."""
    with how.timer.working():
        return verify_parts(tensors, how.num_threads, partial(how.timer.beat, how.stop))


def count_unverified(reads: Iterable[Read]) -> int:
    """Count the tensors without a digest: those in original files."""
    return len({read.at.name for read in reads if read.at.blake3 is None})


def stored_dtypes(modules: Iterable[str], bundles: Bundles) -> dict[str, torch.dtype]:
    """Return the floating dtypes in which the weights of these modules are stored, by FQN, from headers alone."""
    manifest, wanted, floats = bundles.manifest, frozenset(modules), readable_as(torch.float32)
    stages = (stage for stage in manifest.stages if not wanted.isdisjoint(stage.modules))
    dtypes = {at.name: STORED_DTYPES[at.dtype] for stage in stages for at in bundles.tensors_on(stage)
              if at.dtype in floats}  # fmt: skip
    for group in manifest.ties:
        for replica in group.replicas if group.owner.fqn in dtypes else ():
            dtypes.setdefault(replica.fqn, dtypes[group.owner.fqn])
    return dtypes


_Bytes = tuple[InputFile, int, Slice]  # a file, the offset of a tensor in it, and a region of the tensor


def plan_reads(pieces: Iterable[Piece], bundles: Bundles, shape: ModelShape, holds: Holds = WEIGHTS) -> list[Read]:
    """Find where each piece is stored, from headers alone; raises as `load_tensors`."""
    pieces = tuple(pieces)
    located = _locate(dict.fromkeys(piece.fqn for piece in pieces), bundles, shape, holds)
    reads = []
    for piece in pieces:
        for at in located[piece.fqn]:
            _check_kind(at, piece)
            stored = at.part or Slice(offset=at.offset, shape=at.shape, whole_shape=at.shape)
            if (region := intersect(piece.part, stored)) is not None:
                reads.append(Read(into=piece.view(region), at=at))
    return reads


def read_all(reads: Sequence[Read], how: Reading = Reading()) -> list[PartRead]:
    """Execute reads: every two threads start at the two ends of a part of the files.

    Returns the reads that are not verified yet: the partial ones, or all if nothing is hashed. The timer of `how`
    measures their progress, and nothing afterwards.
    """
    if not reads:
        return []
    runs = tuple(_runs(sorted(reads, key=lambda read: (str(read.at.file), read.ranges[0]))))
    parts: list[PartRead] = []
    devices = {read.into.memory.device for read in reads}
    device = next((device for device in devices if device.type == "cuda"), reads[0].into.memory.device)

    def fill_runs(take: Take[list[Read]], stop: threading.Event) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # see `same_gpu`
        blocks = PinnedBlocks(device)
        while not stop.is_set() and (run := take()) is not None:
            parts.extend(_fill_run(run, blocks, stop, how))

    most = _MOST_TO_GPU if device.type == "cuda" else len(runs)
    with how.timer.working():
        share_out(runs, fill_runs, min(how.num_threads, len(runs), most), how.stop)
    return parts


def _locate(fqns: Iterable[str], bundles: Bundles, shape: ModelShape, holds: Holds) -> dict[str, tuple[TensorAt, ...]]:
    manifest, opened = bundles.manifest, dict[int, dict[str, tuple[TensorAt, ...]]]()
    stage_of = {module: stage.index for stage in manifest.stages for module in stage.modules}
    # A replica on its owner's stage need not be stored: it has the owner's bytes.
    owners = {
        replica.fqn: group.owner.fqn
        for group in manifest.ties
        for replica in group.replicas
        if replica.stage == group.owner.stage
    }
    located, missing = dict[str, tuple[TensorAt, ...]](), defaultdict[int, list[str]](list)
    for fqn in fqns:
        stage = stage_of[module_of(fqn, stage_of) or ""]
        if stage not in opened:
            opened[stage] = _open_stage(manifest.stages[stage], bundles, shape, holds)
        at = opened[stage].get(fqn) or opened[stage].get(owners.get(fqn, ""))
        if at is None:
            missing[stage].append(fqn)
        else:
            located[fqn] = at
    for stage, names in sorted(missing.items()):
        what = "" if holds == WEIGHTS else f"the {holds} of "
        raise ShardError(
            f"{bundles.root}: stages[{stage}]",
            f"no shard contains {what}{some_of(sorted(names))}",
            "the bundle is incomplete; write it again",
            code="shard.missing-tensor",
        )
    return located


def _open_stage(stage: Stage, bundles: Bundles, shape: ModelShape, holds: Holds) -> dict[str, tuple[TensorAt, ...]]:
    """Return a stage's tensors of one kind, after checking that they belong to the model and to the stage."""
    modules, tensors = frozenset(stage.modules), join_slices(bundles.tensors_on(stage, holds))
    ignored = shape.ignored_suffixes if holds == WEIGHTS else ()
    unexpected = sorted(
        fqn
        for fqn in tensors
        if module_of(fqn, modules) is None or (fqn not in shape.tensors and not fqn.endswith(ignored))
    )
    if unexpected:
        raise ShardError(
            f"{bundles.root}: stages[{stage.index}]",
            f"its shards contain {some_of(unexpected)}, which its modules do not have",
            code="shard.unexpected-tensor",
        )
    return tensors


def _check_kind(at: TensorAt, piece: Piece) -> None:
    if at.whole_shape != piece.shape:
        raise ShardError(
            f"{at.place}.shape",
            f"expected {list(piece.shape)} (config.json), found {list(at.whole_shape)}",
            "weights and config disagree; use both from one revision",
            code="shard.wrong-shape",
        )
    if at.dtype not in (names := readable_as(piece.memory.dtype)):
        problem = f"expected one of {', '.join(names)}, found {at.dtype}"
        raise ShardError(f"{at.place}.dtype", problem, code="shard.wrong-dtype")


def _runs(reads: Sequence[Read]) -> Iterator[list[Read]]:
    """Split reads into runs of one file, which are the threads' units of work."""
    for _, of_file in groupby(reads, key=lambda read: read.at.file):
        yield from split_by_size(of_file, lambda read: read.nbytes, _RUN_NBYTES)


def _fill_run(run: Sequence[Read], blocks: PinnedBlocks, stop: threading.Event, how: Reading) -> list[PartRead]:
    reader = run[0].at.file.open(merge_ranges(byte_range for read in run for byte_range in read.ranges))
    parts = []
    try:
        for read in run:
            if stop.is_set():
                break
            digest = _fill(read, reader, blocks, how)
            if digest is None or not read.is_whole:
                parts.append(PartRead(at=read.at, region=read.region, digest=digest))
    finally:
        blocks.finish()
        reader.close()
    return parts


def _fill(read: Read, reader: Reader, blocks: PinnedBlocks, how: Reading) -> str | None:
    """Fill a piece, and return the hex digest of its bytes, if they are hashed; that of a whole tensor is compared."""
    at = read.at
    hasher = Hasher() if how.hashes and at.blake3 is not None else None
    for _ in fill(read.into.memory, STORED_DTYPES[at.dtype], reader, at.begin, read.region, hasher, blocks):
        how.timer.beat(how.stop)
    if hasher is None:
        return None
    digest: str = hasher.hexdigest()
    if read.is_whole:
        check_digest(at, digest)
    return digest


def some_of(names: Sequence[str]) -> str:
    """Return the first names of a list that may be long, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
