"""A checkpoint's tensors into memory, whatever stages hold them: each byte read once, digests checked on the way."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property

from manifests.digest import PREFIX, Hasher
from manifests.errors import InputError
from manifests.models import ModelShape, module_of
from manifests.schema import WEIGHTS, Holds, Stage
from manifests.slices import Slice
from runner.loading.boxes import blocks_of, intersect
from runner.loading.fill import TORCH_DTYPES, fill
from runner.loading.pieces import Piece
from runner.loading.staging import Staging
from stores.base import InputFile, Range, Reader, merge_ranges
from stores.bundles import Bundles, TensorAt, join_slices

__all__ = ["LoadReport", "Read", "load_tensors", "plan_reads", "read_all"]

_RUN_NBYTES = 64 << 20  # what a thread reads before it takes more


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What one rank read: `nbytes` of tensor data, in `load_s` seconds.

    Of `num_parts` stored tensors it read a part alone, which no digest proves.
    """

    num_tensors: int
    num_parts: int
    nbytes: int
    load_s: float


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
        blocks = blocks_of(self.at.shape, self.box, TORCH_DTYPES[self.at.dtype].itemsize)
        return merge_ranges(
            (self.at.begin + block.begin, self.at.begin + block.begin + block.nbytes) for block in blocks
        )

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


def load_tensors(pieces: Iterable[Piece], bundles: Bundles, shape: ModelShape, holds: Holds = WEIGHTS) -> LoadReport:
    """Fill what a rank holds of a model's tensors with weights or moments, in place.

    Every rank calls this for what it holds; it runs no collectives, and opens only files of the stages
    that hold these FQNs there, whatever stages are trained here. Of a tensor that it holds in part it
    reads that part, from whatever slices are stored. What is stored in another floating dtype is cast.
    A replica that is not stored beside its owner gets the owner's bytes.

    Shapes: as stored; see `manifests.models`.
    Raises:
        InputError: a shard is missing or damaged, a tensor is missing, unexpected or misshapen, or
            bytes are not what their digest says (those of virtual bundles, and of parts, have none).
    """
    started_s = time.perf_counter()
    reads: dict[_Bytes, Read] = {}
    wanted: dict[_Bytes, list[Piece]] = defaultdict(list)  # two tied names may stand for the same bytes
    for read in plan_reads(pieces, bundles, shape, holds):
        key = read.at.file, read.at.begin, read.box
        reads.setdefault(key, read)
        wanted[key].append(read.into)
    read_all(list(reads.values()))
    for first, *others in wanted.values():
        for other in others:
            other.memory.copy_(first.memory)
    return LoadReport(
        num_tensors=len({read.at.name for read in reads.values()}),
        num_parts=sum(not read.is_whole for read in reads.values()),
        nbytes=sum(read.nbytes for read in reads.values()),
        load_s=time.perf_counter() - started_s,
    )


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


def read_all(reads: Sequence[Read]) -> None:
    """Read all of these, with one thread from the front of the files and one from the back.

    Raises:
        InputError: a file cannot be read, or whole tensors are not what their digests say.
    """
    in_order = sorted(reads, key=lambda read: (str(read.at.file), read.ranges[0]))
    queue, stop = deque(_runs(in_order)), threading.Event()

    def work(take: Callable[[], list[Read]]) -> None:
        while not stop.is_set():
            try:
                run = take()
            except IndexError:  # none left
                return
            _fill_run(run, stop)

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work, take) for take in (queue.popleft, queue.pop)]
        try:
            done, _ = wait(workers, return_when=FIRST_EXCEPTION)
            for worker in done:
                worker.result()
        finally:
            stop.set()


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
        raise InputError(
            f"{bundles.root}: stages[{stage}]",
            f"no shard holds {what}{_some(sorted(names))}",
            "the bundle is incomplete; write it again",
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
        raise InputError(
            f"{bundles.root}: stages[{stage.index}]",
            f"its shards hold {_some(unexpected)}, which its modules do not have",
        )
    return found


def _check_kind(at: TensorAt, piece: Piece) -> None:
    where = f"{at.file}: {at.name!r}"
    if at.whole_shape != piece.shape:
        raise InputError(
            f"{where}.shape",
            f"expected {list(piece.shape)} (config.json), found {list(at.whole_shape)}",
            "weights and config disagree; pack both from one revision",
        )
    if at.dtype not in TORCH_DTYPES:
        raise InputError(f"{where}.dtype", f"expected one of {', '.join(TORCH_DTYPES)}, found {at.dtype}")


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


def _fill_run(run: Sequence[Read], stop: threading.Event) -> None:
    reader = run[0].at.file.open(merge_ranges(byte_range for read in run for byte_range in read.ranges))
    staging = Staging(run[0].into.memory.device)
    try:
        for read in run:
            if stop.is_set():
                return
            _fill(read, reader, staging)
    finally:
        staging.finish()
        reader.close()


def _fill(read: Read, reader: Reader, staging: Staging) -> None:
    at = read.at
    hasher = None if at.digest is None or not read.is_whole else Hasher()
    fill(read.into.memory, TORCH_DTYPES[at.dtype], reader, at.begin, read.box, hasher, staging)
    if hasher is not None and hasher.hexdigest() != at.digest:
        raise InputError(
            f"{at.file}: {at.name!r}",
            f"expected {PREFIX}{at.digest}, found {PREFIX}{hasher.hexdigest()}",
            "the shard was damaged after it was written; reshard verify names all damage",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
