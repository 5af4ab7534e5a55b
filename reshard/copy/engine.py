"""The executor of plans: it copies byte ranges from files to files, hashing them on the way.

Memory: two blocks of `BLOCK_NBYTES`, one per thread, and a few hundred bytes per tensor of the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from manifests.digest import Hasher, digest_bytes
from reshard.copy.direct_io import BLOCK_NBYTES, Io, OutputFile, aligned_buffer
from reshard.copy.journal import Journal
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import TensorAt, check_digest
from stores.base import InputFile, Range, Reader, merge_ranges
from stores.both_ends import from_both_ends
from stores.local import LocalFile

__all__ = [
    "ByteCounter",
    "Output",
    "WriteOptions",
    "WrittenShard",
    "hash_tensors",
    "write_in_order",
    "write_shards",
    "write_tensors",
]

_MAX_OPEN = 128  # output files open at a time
_RUN_NBYTES = 64 << 20  # of a run, which is one thread's unit of work: whole tensors

ByteCounter = Callable[[int], object]  # called with the bytes of each step


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How shards are written. Without `sync`, flushing them is left to the kernel, as after `cp`."""

    io: Io = "direct"
    sync: bool = True
    journal: Journal | None = None
    progress: ByteCounter = lambda nbytes: None


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShard:
    """A shard on disk."""

    path: str
    nbytes: int
    digest: str


class Output(Protocol):
    """A file under construction."""

    def write(self, buffer: memoryview, begin: int, end: int, position: int) -> None:
        """Write `buffer[begin:end]` at `position`; begin and position are equal modulo a sector."""
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor to copy, and where its bytes begin in the output file (None: only hashed)."""

    origin: TensorAt
    output: Output | None
    position: int


def write_shards(
    shards: Sequence[OutputShard], folder: Path, options: WriteOptions | None = None
) -> tuple[WrittenShard, ...]:
    """Write shards below `folder`.

    Every byte is read once and hashed on the way; known digests are verified.

    Raises:
        ShardError: a tensor's bytes do not match its digest.
        InputError: a source file is shorter than planned, or cannot be read.
    """
    options = options or WriteOptions()
    written: list[WrittenShard] = []
    for first in range(0, len(shards), _MAX_OPEN):
        written += _write_together(shards[first : first + _MAX_OPEN], folder, options)
    return tuple(written)


def write_tensors(shard: OutputShard, names: Collection[str], folder: Path, options: WriteOptions) -> dict[str, str]:
    """Write some of a shard's tensors below `folder`, and nothing else of it; return their hex digests by name.

    Other processes may write the other tensors at the same time, unless two share a sector.

    Raises:
        InputError: as `write_shards`.
    """
    path = folder / shard.path
    path.parent.mkdir(parents=True, exist_ok=True)
    file = OutputFile(path, shard.nbytes, options.io)
    try:
        pieces = [piece for piece in _pieces(shard, file) if piece.origin.name in names]
        digests = _execute(pieces, options.progress, options.journal)
        if options.sync:
            file.sync()
    finally:
        file.close()
    return dict(zip((piece.origin.name for piece in pieces), digests, strict=True))


def hash_tensors(tensors: Sequence[TensorAt], progress: ByteCounter = lambda nbytes: None) -> tuple[str, ...]:
    """Return the hex digest of each tensor's bytes; known digests are ignored."""
    return tuple(_execute([_Piece(_unverified(tensor), None, 0) for tensor in tensors], progress))


def write_in_order(shard: OutputShard, output: Output, progress: ByteCounter) -> None:
    """Write a shard's data to `output` sequentially, in this thread.

    Raises:
        InputError: as `write_shards`.
    """
    stop = threading.Event()  # never set: callers stop this by raising in `progress`
    for run in _runs(_pieces(shard, output)):
        _copy_run(run, progress, stop)


def _write_together(shards: Sequence[OutputShard], folder: Path, options: WriteOptions) -> list[WrittenShard]:
    with ExitStack() as stack:
        files, pieces = [], []
        for shard in shards:
            path = folder / shard.path
            path.parent.mkdir(parents=True, exist_ok=True)
            files.append(OutputFile(path, shard.nbytes, options.io))
            stack.callback(files[-1].close)
            pieces += _pieces(shard, files[-1])
        digests = iter(_execute(pieces, options.progress, options.journal))
        return [_finish(shard, file, digests, sync=options.sync) for shard, file in zip(shards, files, strict=True)]


def _finish(shard: OutputShard, file: OutputFile, digests: Iterator[str], *, sync: bool) -> WrittenShard:
    """Write the header, now that the digests are known."""
    header = shard.header_with({origin.name: next(digests) for origin, _ in shard.placed})
    file.finish(header, sync=sync)
    return WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=digest_bytes(header))


def _pieces(shard: OutputShard, file: Output) -> list[_Piece]:
    """Return a shard's tensors in the order of their bytes in it."""
    return [_Piece(origin, file, position) for origin, position in shard.placed]


def _execute(pieces: Sequence[_Piece], progress: ByteCounter, journal: Journal | None = None) -> list[str]:
    """Copy and hash every piece; return the hex digests in the same order. The first failure stops all.

    What an interrupted run has written, by the journal, is read and hashed, and written again only if it differs.
    """
    digests: dict[int, list[str]] = {}

    def copy(numbered: tuple[int, list[_Piece]], stop: threading.Event) -> None:
        number, run = numbered
        digests[number] = _copy_or_reuse(run, progress, stop, journal)

    from_both_ends(enumerate(_runs(pieces)), copy)
    return [digest for number in sorted(digests) for digest in digests[number]]


def _runs(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Split pieces into runs of whole, consecutive tensors of one file."""
    run: list[_Piece] = []
    nbytes = 0
    for piece in pieces:
        if run and (nbytes + piece.origin.nbytes > _RUN_NBYTES or piece.output is not run[-1].output):
            yield run
            run, nbytes = [], 0
        run.append(piece)
        nbytes += piece.origin.nbytes
    if run:
        yield run


def _copy_or_reuse(
    run: list[_Piece], progress: ByteCounter, stop: threading.Event, journal: Journal | None
) -> list[str]:
    """Copy a run, unless the journal has it and the bytes on disk match."""
    output, position = run[0].output, run[0].position
    if journal is None or not isinstance(output, OutputFile):
        return _copy_run(run, progress, stop)
    name = output.path.relative_to(journal.folder).as_posix()
    known = journal.digests(name, position)
    if known is not None:
        file = LocalFile(output.path, may_change=True)
        on_disk = [_Piece(replace(_unverified(each.origin), file=file, begin=each.position), None, 0) for each in run]
        if _copy_run(on_disk, progress, stop) == known:
            return known
    digests = _copy_run(run, progress, stop)
    if not stop.is_set():
        journal.record(name, position, digests)
    return digests


def _unverified(tensor: TensorAt) -> TensorAt:
    return replace(tensor, digest=None)


def _copy_run(run: list[_Piece], progress: ByteCounter, stop: threading.Event) -> list[str]:
    """Read, hash and write one block after the other."""
    buffer, output, hasher = aligned_buffer(), run[0].output, Hasher()
    digests: list[str] = []
    with ExitStack() as stack:
        sources = _Sources(run, stack)
        for position, parts in _blocks(run):
            if stop.is_set():
                return []
            for file, where, begin, end in _merged_reads(parts):
                sources[file].read_into(buffer[begin:end], where)
            for part in parts:
                hasher.update(buffer[part.begin : part.end])
                if part.is_last:
                    digests.append(hasher.hexdigest())
                    check_digest(part.origin, digests[-1])
                    hasher = Hasher()
            begin, end = parts[0].begin, parts[-1].end
            if output is not None:
                output.write(buffer, begin, end, position)
            progress(end - begin)
    return digests


class _Chunk(NamedTuple):
    """The part of a block, from `begin` to `end`, that has bytes of one tensor, from its `offset` on."""

    origin: TensorAt
    offset: int
    begin: int
    end: int
    is_last: bool


def _blocks(run: list[_Piece]) -> Iterator[tuple[int, list[_Chunk]]]:
    """Split a run into blocks; yield each block's position in the output, and its parts in order.

    A block's positions in the buffer and in the file are equal modulo its size, so that whole sectors can be written
    with O_DIRECT.
    """
    position = run[0].position
    begin = end = position % BLOCK_NBYTES
    parts: list[_Chunk] = []
    for origin in (piece.origin for piece in run):
        offset, is_last = 0, False
        while not is_last:
            count = min(BLOCK_NBYTES - end, origin.nbytes - offset)
            is_last = offset + count == origin.nbytes
            parts.append(_Chunk(origin, offset, end, end + count, is_last))
            offset, end = offset + count, end + count
            if end == BLOCK_NBYTES:
                yield position, parts
                position, begin, end, parts = position + end - begin, 0, 0, []
    if parts:
        yield position, parts


def _merged_reads(parts: list[_Chunk]) -> Iterator[tuple[InputFile, int, int, int]]:
    """Yield the reads that fill a block, adjacent ones merged: file, position in it, begin and end in the block."""
    first, last = parts[0], parts[0]
    for part in parts[1:]:
        follows = last.origin.begin + last.offset + last.end - last.begin == part.origin.begin + part.offset
        if not follows or part.origin.file != first.origin.file:
            yield first.origin.file, first.origin.begin + first.offset, first.begin, last.end
            first = part
        last = part
    yield first.origin.file, first.origin.begin + first.offset, first.begin, last.end


class _Sources(dict[InputFile, Reader]):
    """The readers of one run, each opened with the ranges that will be read."""

    def __init__(self, run: list[_Piece], stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack
        self._ranges: dict[InputFile, list[Range]] = {}
        for origin in (piece.origin for piece in run):
            self._ranges.setdefault(origin.file, []).append((origin.begin, origin.end))

    def __missing__(self, file: InputFile) -> Reader:
        self[file] = file.open(merge_ranges(self._ranges[file]))
        self._stack.callback(self[file].close)
        return self[file]
