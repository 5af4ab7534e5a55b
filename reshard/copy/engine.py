"""The executor of plans: it copies byte ranges from files to files, hashing them on the way.

Memory: two blocks of `BLOCK_NBYTES`, one per thread, 32 bytes per tensor for its digest, and a few hundred bytes for
each of the `_RUN_TENSORS` tensors that a thread works on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from manifests.digest import DigestTable, HashedBlocks, Hasher
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
_RUN_TENSORS = 1 << 12

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
class _Run:
    """Consecutive whole tensors of one file, from tensor `first` of all that are written on.

    Their bytes begin at `position` of `output`, or are only hashed if it is None. A run `verifies` known digests.
    """

    tensors: Sequence[TensorAt]
    first: int
    output: Output | None = None
    position: int = 0
    verifies: bool = True


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
    placed = ((tensor, position) for tensor, position in shard.placed if tensor.name in names)
    tensors, positions = zip(*placed, strict=True) if names else ((), (0,))
    file = OutputFile(path, shard.nbytes, options.io)
    try:
        runs = _runs(_Run(tensors, 0, file, positions[0]))
        digests = _execute(runs, len(tensors), options.progress, options.journal)
        if options.sync:
            file.sync()
    finally:
        file.close()
    return dict(zip((tensor.name for tensor in tensors), digests, strict=True))


def hash_tensors(tensors: Sequence[TensorAt], progress: ByteCounter = lambda nbytes: None) -> DigestTable:
    """Return the hex digest of each tensor's bytes; known digests are ignored."""
    return _execute(_runs(_Run(tensors, 0, verifies=False)), len(tensors), progress)


def write_in_order(
    shard: OutputShard, output: Output, progress: ByteCounter, digests: DigestTable | None = None
) -> None:
    """Write a shard's data to `output` sequentially, in this thread, and verify the digests if they are passed.

    Raises:
        InputError: as `write_shards`.
    """
    stop = threading.Event()  # never set: callers stop this by raising in `progress`
    for run in _runs(_Run(shard.in_data_order, 0, output, shard.header_nbytes)):
        found = DigestTable(_copy_run(run, progress, stop))
        if digests is not None:
            for tensor, digest, expected in zip(run.tensors, found, digests[run.first :], strict=False):
                check_digest(tensor, digest, expected)


def _write_together(shards: Sequence[OutputShard], folder: Path, options: WriteOptions) -> list[WrittenShard]:
    firsts = list(accumulate((len(shard.origins) for shard in shards), initial=0))
    with ExitStack() as stack:
        files, runs = list[OutputFile](), list[_Run]()
        for shard, first in zip(shards, firsts, strict=False):
            path = folder / shard.path
            path.parent.mkdir(parents=True, exist_ok=True)
            files.append(OutputFile(path, shard.nbytes, options.io))
            stack.callback(files[-1].close)
            runs += _runs(_Run(shard.in_data_order, first, files[-1], shard.header_nbytes))
        digests = _execute(runs, firsts[-1], options.progress, options.journal)
        return [
            _finish(shard, file, digests[first:last], sync=options.sync)
            for shard, file, (first, last) in zip(shards, files, pairwise(firsts), strict=True)
        ]


def _finish(shard: OutputShard, file: OutputFile, digests: DigestTable, *, sync: bool) -> WrittenShard:
    """Write the header, now that the digests are known."""
    header = HashedBlocks(shard.header_blocks(digests))
    file.finish(header, sync=sync)
    return WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=header.digest)


def _execute(
    runs: Iterable[_Run], num_tensors: int, progress: ByteCounter, journal: Journal | None = None
) -> DigestTable:
    """Copy and hash every run; return the tensors' digests. The first failure stops all.

    What an interrupted run has written, by the journal, is read and hashed, and written again only if it differs.
    """
    digests = DigestTable.blank(num_tensors)

    def copy(run: _Run, stop: threading.Event) -> None:
        digests.put(run.first, _copy_or_reuse(run, progress, stop, journal))

    from_both_ends(runs, copy)
    return digests


def _runs(run: _Run) -> Iterator[_Run]:
    """Split a run into runs of limited length, of whole tensors."""
    begin, nbytes, position = 0, 0, run.position
    for end, tensor in enumerate(run.tensors):
        if end > begin and (nbytes + tensor.nbytes > _RUN_NBYTES or end - begin == _RUN_TENSORS):
            yield replace(run, tensors=run.tensors[begin:end], first=run.first + begin, position=position)
            begin, nbytes, position = end, 0, position + nbytes
        nbytes += tensor.nbytes
    if begin < len(run.tensors):
        yield replace(run, tensors=run.tensors[begin:], first=run.first + begin, position=position)


def _copy_or_reuse(run: _Run, progress: ByteCounter, stop: threading.Event, journal: Journal | None) -> bytes:
    """Copy a run, unless the journal has it and the bytes on disk match."""
    output = run.output
    if journal is None or not isinstance(output, OutputFile):
        return _copy_run(run, progress, stop)
    name = output.path.relative_to(journal.folder).as_posix()
    known = journal.digests(name, run.position)
    if known is not None and _copy_run(_on_disk(run, output), progress, stop) == known:
        return known
    digests = _copy_run(run, progress, stop)
    if not stop.is_set():
        journal.record(name, run.position, digests)
    return digests


def _on_disk(run: _Run, output: OutputFile) -> _Run:
    """Return a run that hashes what the output has where this one would write."""
    file, ends = (
        LocalFile(output.path, may_change=True),
        accumulate((each.nbytes for each in run.tensors), initial=run.position),
    )
    tensors = [replace(each, file=file, begin=begin) for each, begin in zip(run.tensors, ends, strict=False)]
    return _Run(tensors, run.first, verifies=False)


def _copy_run(run: _Run, progress: ByteCounter, stop: threading.Event) -> bytes:
    """Read, hash and write one block after the other; return the digests."""
    buffer, output, hasher = aligned_buffer(), run.output, Hasher()
    digests = bytearray()
    with ExitStack() as stack:
        sources = _Sources(run.tensors, stack)
        for position, parts in _blocks(run):
            if stop.is_set():
                return b""
            for file, where, begin, end in _merged_reads(parts):
                sources[file].read_into(buffer[begin:end], where)
            for part in parts:
                hasher.update(buffer[part.begin : part.end])
                if part.is_last:
                    digests += hasher.digest()
                    if run.verifies and part.origin.digest is not None:
                        check_digest(part.origin, hasher.hexdigest())
                    hasher = Hasher()
            begin, end = parts[0].begin, parts[-1].end
            if output is not None:
                output.write(buffer, begin, end, position)
            progress(end - begin)
    return bytes(digests)


class _Chunk(NamedTuple):
    """The part of a block, from `begin` to `end`, that has bytes of one tensor, from its `offset` on."""

    origin: TensorAt
    offset: int
    begin: int
    end: int
    is_last: bool


def _blocks(run: _Run) -> Iterator[tuple[int, list[_Chunk]]]:
    """Split a run into blocks; yield each block's position in the output, and its parts in order.

    A block's positions in the buffer and in the file are equal modulo its size, so that whole sectors can be written
    with O_DIRECT.
    """
    position = run.position
    begin = end = position % BLOCK_NBYTES
    parts: list[_Chunk] = []
    for origin in run.tensors:
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

    def __init__(self, tensors: Iterable[TensorAt], stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack
        self._ranges: dict[InputFile, list[Range]] = {}
        for origin in tensors:
            self._ranges.setdefault(origin.file, []).append((origin.begin, origin.end))

    def __missing__(self, file: InputFile) -> Reader:
        self[file] = file.open(merge_ranges(self._ranges[file]))
        self._stack.callback(self[file].close)
        return self[file]
