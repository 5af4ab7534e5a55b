"""A checkpoint's tensors into memory, whatever stages hold them: each byte read once, digests checked on the way."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property

from manifests.digest import PREFIX, Hasher
from manifests.errors import ShardError
from manifests.models import ModelShape, module_of
from manifests.schema import WEIGHTS, Holds, Stage
from manifests.slices import Slice
from runner.load.fill import TORCH_DTYPES, fill
from runner.load.verify_parts import PartRead, share_parts, verify_parts
from runner.tensors.local_shard import Piece
from runner.tensors.pinned import PinnedBlocks
from runner.tensors.regions import intersect, ranges_of
from stores.base import InputFile, Range, Reader, merge_ranges
from stores.bundles import Bundles, TensorAt, join_slices

__all__ = ["LoadReport", "Read", "count_unverified", "load_tensors", "plan_reads", "read_all", "read_tensors"]

_RUN_NBYTES = 64 << 20  # what a thread reads before it takes more


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What one rank read: `nbytes` of tensor data, and `verified_nbytes` more to verify parts, in `load_s` seconds.

    Of `num_parts` stored tensors it read a part alone. `num_unverified` have no digest: they are of original files.
    """

    num_tensors: int
    num_parts: int
    nbytes: int
    load_s: float
    verified_nbytes: int = 0
    num_unverified: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """A part of a stored tensor on its way into memory."""

    into: Piece
    at: TensorAt

    @property
    def is_whole(self) -> bool:
        return tuple(self.into.memory.shape) == self.at.shape

    @cached_property
    def box(self) -> Slice:
        """The part as a box of what is stored."""
        offset = tuple(own - stored for own, stored in zip(self.into.offset, self.at.offset, strict=True))
        return Slice(offset=offset, shape=tuple(self.into.memory.shape), whole_shape=self.at.shape)

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """The bytes of the file that are read."""
        if self.is_whole:
            return ((self.at.begin, self.at.end),)
        ranges = ranges_of(self.at.shape, self.box, TORCH_DTYPES[self.at.dtype].itemsize)
        return merge_ranges((self.at.begin + begin, self.at.begin + end) for begin, end in ranges)

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


def load_tensors(pieces: Iterable[Piece], bundles: Bundles, shape: ModelShape, holds: Holds = WEIGHTS) -> LoadReport:
    """Fill what a rank has of a model's tensors as `read_tensors` does, and verify what it read in part by itself.

    Raises:
        InputError: as `read_tensors`, or parts are not of a tensor with its digest.
    """
    started_s = time.perf_counter()
    report, parts = read_tensors(pieces, bundles, shape, holds)
    verified_nbytes = verify_parts(share_parts(parts))
    return replace(report, verified_nbytes=verified_nbytes, load_s=time.perf_counter() - started_s)


def read_tensors(
    pieces: Iterable[Piece], bundles: Bundles, shape: ModelShape, holds: Holds = WEIGHTS
) -> tuple[LoadReport, list[PartRead]]:
    """Fill what a rank has of a model's tensors with weights or optimizer state, in place.

    Every rank calls this for what it has; it runs no collectives, and opens only files of the stages that store these
    FQNs, whatever stages are trained here. Of a tensor that it has in part it reads that part, from whatever slices are
    stored, and returns it for `verify_parts`: no digest was compared yet. What is stored in another floating dtype is
    cast. A replica that is not stored beside its owner gets the owner's bytes.

    Shapes: as stored; see `manifests.models`.
    Raises:
        InputError: a shard is missing or damaged, a tensor is missing, unexpected or misshapen, or the
            bytes of whole ones are not what their digest says (those of virtual bundles have none).
    """
    started_s = time.perf_counter()
    reads: dict[_Bytes, Read] = {}
    wanted: dict[_Bytes, list[Piece]] = defaultdict(list)  # two tied names may stand for the same bytes
    for read in plan_reads(pieces, bundles, shape, holds):
        key = read.at.file, read.at.begin, read.box
        reads.setdefault(key, read)
        wanted[key].append(read.into)
    parts = read_all(list(reads.values()))
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


def count_unverified(reads: Iterable[Read]) -> int:
    """Count the tensors that have no digest: those of original files."""
    return len({read.at.name for read in reads if read.at.digest is None})


_Bytes = tuple[InputFile, int, Slice]  # a file, where in it a tensor begins, and what of that is wanted


def plan_reads(pieces: Iterable[Piece], bundles: Bundles, shape: ModelShape, holds: Holds = WEIGHTS) -> list[Read]:
    """Find where each piece is stored, reading headers alone; raises as `load_tensors`."""
    pieces = tuple(pieces)
    located = _locate(dict.fromkeys(piece.fqn for piece in pieces), bundles, shape, holds)
    reads = []
    for piece in pieces:
        for at in located[piece.fqn]:
            _check_kind(at, piece)
            stored = at.part or Slice(offset=at.offset, shape=at.shape, whole_shape=at.shape)
            if (box := intersect(piece.part, stored)) is not None:
                reads.append(Read(into=piece.view(box), at=at))
    return reads


def read_all(reads: Sequence[Read]) -> list[PartRead]:
    """Read all of these, with one thread from the front of the files and one from the back.

    Returns the parts of tensors among them, which nothing has verified yet.

    Raises:
        InputError: a file cannot be read, or whole tensors are not what their digests say.
    """
    in_order = sorted(reads, key=lambda read: (str(read.at.file), read.ranges[0]))
    queue, stop, parts = deque(_runs(in_order)), threading.Event(), list[PartRead]()

    def work(take: Callable[[], list[Read]]) -> None:
        while not stop.is_set():
            try:
                run = take()
            except IndexError:  # none left
                return
            parts.extend(_fill_run(run, stop))

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work, take) for take in (queue.popleft, queue.pop)]
        try:
            done, _ = wait(workers, return_when=FIRST_EXCEPTION)
            for worker in done:
                worker.result()
        finally:
            stop.set()
    return parts


def _locate(fqns: Iterable[str], bundles: Bundles, shape: ModelShape, holds: Holds) -> dict[str, tuple[TensorAt, ...]]:
    manifest, opened = bundles.manifest, dict[int, dict[str, tuple[TensorAt, ...]]]()
    stage_of = {module: stage.index for stage in manifest.stages for module in stage.modules}
    # A replica on its owner's stage may be left out: it has the owner's bytes.
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
            f"no shard holds {what}{_some(sorted(names))}",
            "the bundle is incomplete; write it again",
            code="shard.missing-tensor",
        )
    return located


def _open_stage(stage: Stage, bundles: Bundles, shape: ModelShape, holds: Holds) -> dict[str, tuple[TensorAt, ...]]:
    """Give what a stage stores of one kind, having seen that it is the model's and the stage's own."""
    modules, found = frozenset(stage.modules), join_slices(bundles.tensors_on(stage, holds))
    ignored = (shape.ignored_suffixes if holds == WEIGHTS else ()) or ("\0",)
    unexpected = sorted(
        fqn
        for fqn in found
        if module_of(fqn, modules) is None or (fqn not in shape.tensors and not fqn.endswith(ignored))
    )
    if unexpected:
        raise ShardError(
            f"{bundles.root}: stages[{stage.index}]",
            f"its shards hold {_some(unexpected)}, which its modules do not have",
            code="shard.unexpected-tensor",
        )
    return found


def _check_kind(at: TensorAt, piece: Piece) -> None:
    where = f"{at.file}: {at.name!r}"
    if at.whole_shape != piece.shape:
        raise ShardError(
            f"{where}.shape",
            f"expected {list(piece.shape)} (config.json), found {list(at.whole_shape)}",
            "weights and config disagree; pack both from one revision",
            code="shard.wrong-shape",
        )
    if at.dtype not in TORCH_DTYPES:
        raise ShardError(
            f"{where}.dtype", f"expected one of {', '.join(TORCH_DTYPES)}, found {at.dtype}", code="shard.wrong-dtype"
        )


def _runs(reads: Sequence[Read]) -> Iterator[list[Read]]:
    """Cut reads into runs of one file, each of them a thread's piece of work."""
    run: list[Read] = []
    nbytes = 0
    for read in reads:
        if run and (nbytes + read.nbytes > _RUN_NBYTES or read.at.file != run[-1].at.file):
            yield run
            run, nbytes = [], 0
        run.append(read)
        nbytes += read.nbytes
    if run:
        yield run


def _fill_run(run: Sequence[Read], stop: threading.Event) -> list[PartRead]:
    reader = run[0].at.file.open(merge_ranges(byte_range for read in run for byte_range in read.ranges))
    staging = PinnedBlocks(run[0].into.memory.device)
    parts = []
    try:
        for read in run:
            if stop.is_set():
                break
            found = _fill(read, reader, staging)
            if not read.is_whole:
                parts.append(PartRead(at=read.at, box=read.box, digest=found))
    finally:
        staging.finish()
        reader.close()
    return parts


def _fill(read: Read, reader: Reader, staging: PinnedBlocks) -> str:
    """Fill a piece and return the hex digest of what was read for it, having compared that of a whole tensor."""
    at, hasher = read.at, Hasher()
    fill(
        read.into.memory,
        TORCH_DTYPES[at.dtype],
        reader,
        at.begin,
        read.box,
        None if at.digest is None else hasher,
        staging,
    )
    found: str = hasher.hexdigest()
    if read.is_whole and at.digest not in (None, found):
        raise ShardError(
            f"{at.file}: {at.name!r}",
            f"expected {PREFIX}{at.digest}, found {PREFIX}{found}",
            "the shard was damaged after it was written; reshard verify names all damage",
            code="shard.digest-mismatch",
        )
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
