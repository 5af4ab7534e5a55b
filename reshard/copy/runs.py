"""Runs: consecutive tensors of a file, copied and hashed by one thread, or one large tensor by a team of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

from manifests.digest import Hasher
from manifests.errors import Parameter, UsageError
from reshard.tensors.checkpoint import check_digest
from reshard.tensors.checksums import stored_file
from reshard.tensors.lazy import fetching_with, stored_origins
from reshard.tensors.slices import pieces_of
from stores.base import InputFile, Range, Reader, merge_ranges
from stores.bundles import TensorAt
from stores.direct_io import BLOCK_NBYTES, OutputFile, aligned_buffer
from stores.local import LocalFile
from stores.prefetch import PlannedReader, Prefetcher, RemoteFile

_RUN_NBYTES = 64 << 20  # of a run, which is one thread's unit of work: whole tensors
_RUN_TENSORS = 1 << 12

ByteCounter = Callable[[int], object]  # called with the bytes of each step


class Output(Protocol):
    """A file under construction."""

    @property
    def is_aligned(self) -> bool:
        """Whether the address and `begin` must equal the position modulo a sector."""

    def write(self, buffer: memoryview, begin: int, end: int, position: int) -> None:
        """Write `buffer[begin:end]` at `position`.

        Afterwards, memory may be used for other bytes, unless it is read-only.
        """


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive whole tensors of one file, from tensor `first` of all that are written on.

    Their bytes begin at `position` of `output`, or are only hashed if it is None. A run `verifies` known digests; bytes
    in memory that were hashed before need not be again.
    """

    tensors: Sequence[TensorAt]
    first: int
    output: Output | None = None
    position: int = 0
    verifies: bool = True
    is_hashed: bool = False


def split_run(run: Run) -> Iterator[Run]:
    """Split a run into runs of limited length, of whole tensors."""
    begin, nbytes, position = 0, 0, run.position
    for end, tensor in enumerate(run.tensors):
        if end > begin and (nbytes + tensor.nbytes > _RUN_NBYTES or end - begin == _RUN_TENSORS):
            yield replace(run, tensors=run.tensors[begin:end], first=run.first + begin, position=position)
            begin, nbytes, position = end, 0, position + nbytes
        nbytes += tensor.nbytes
    if begin < len(run.tensors):
        yield replace(run, tensors=run.tensors[begin:], first=run.first + begin, position=position)


def on_disk(run: Run, output: OutputFile) -> Run:
    """Return a run that hashes what the output has where this one would write."""
    file = LocalFile(output.path, may_change=True)
    begins = accumulate((tensor.nbytes for tensor in run.tensors), initial=run.position)
    tensors = [replace(tensor, file=file, begin=begin) for tensor, begin in zip(run.tensors, begins, strict=False)]
    return Run(tensors, run.first, verifies=False)


def copy_run(run: Run, readers: Mapping[InputFile, Reader], progress: ByteCounter, prefetcher: Prefetcher) -> list[str]:
    """Read, hash and write one block after the other; return the hex digests. `readers` are those that are open."""
    output, hasher = run.output, Hasher()
    digests: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(fetching_with(prefetcher))
        sources = Sources(run.tensors, readers, stack)
        for memory, gone, position, parts in _filled(run, sources):
            if prefetcher.stop.is_set():
                return []
            for part in () if run.is_hashed else parts:
                hasher.update(memory[part.begin - gone : part.end - gone])
                if part.ended is not None:
                    digests.append(hasher.hexdigest())
                    if run.verifies and part.ended.blake3 is not None:
                        check_digest(part.ended, digests[-1])
                    hasher = Hasher()
            begin, end = parts[0].begin, parts[-1].end
            if output is not None:
                output.write(memory, begin - gone, end - gone, position)
            progress(end - begin)
    return digests


def _filled(run: Run, sources: Sources) -> Iterator[tuple[memoryview, int, int, list[Chunk]]]:
    """Yield a run's blocks: memory, where in a block that begins, the position in the output, and the parts.

    The memory is that of a response where one has the bytes, of all of a block or of the rest of it, else a buffer.
    """
    buffer, is_aligned = aligned_buffer(), run.output is not None and run.output.is_aligned
    for position, parts in blocks_of(run):
        while parts:
            begin, reads = parts[0].begin, list(merged_reads(parts))
            lent = _lent(reads, sources) if len(reads) == 1 and not is_aligned else None
            if lent is None:
                for file, where, first, last in reads:
                    sources[file].read_into(buffer[first:last], where)
                yield buffer, 0, position, parts
                break
            now, parts = _split(parts, begin + len(lent))
            yield lent, begin, position, now
            position += len(lent)


def _lent(reads: list[tuple[InputFile, int, int, int]], sources: Sources) -> memoryview | None:
    ((file, position, begin, end),) = reads
    reader = sources[file]
    return reader.lend(position, end - begin) if isinstance(reader, PlannedReader) else None


def _split(parts: list[Chunk], at: int) -> tuple[list[Chunk], list[Chunk]]:
    """Split the parts of a block at a place in it."""
    before, after = list[Chunk](), list[Chunk]()
    for part in parts:
        if part.end <= at:
            before.append(part)
        elif part.begin >= at:
            after.append(part)
        else:
            before.append(part._replace(end=at, ended=None))
            after.append(part._replace(position=part.position + at - part.begin, begin=at))
    return before, after


class Chunk(NamedTuple):
    """The part of a block, from `begin` to `end`, whose bytes are at `position` in a file."""

    file: InputFile
    position: int
    begin: int
    end: int
    ended: TensorAt | None  # the tensor whose last bytes these are


def blocks_of(run: Run) -> Iterator[tuple[int, list[Chunk]]]:
    """Split a run into blocks; yield each block's position in the output, and its parts in order.

    A block's positions in the buffer and in the file are equal modulo its size, so that whole sectors can be written
    with O_DIRECT.
    """
    position = run.position
    begin = end = position % BLOCK_NBYTES
    parts: list[Chunk] = []
    for origin in run.tensors:
        pieces = pieces_of(origin)
        for piece in pieces:
            at, is_last = piece.begin, False
            while not is_last:
                count = min(BLOCK_NBYTES - end, piece.end - at)
                is_last = at + count == piece.end
                ended = origin if is_last and piece is pieces[-1] else None
                parts.append(Chunk(piece.file, at, end, end + count, ended))
                at, end = at + count, end + count
                if end == BLOCK_NBYTES:
                    yield position, parts
                    position, begin, end, parts = position + end - begin, 0, 0, []
    if parts:
        yield position, parts


def merged_reads(parts: list[Chunk]) -> Iterator[tuple[InputFile, int, int, int]]:
    """Yield the reads that fill a block, adjacent ones merged: file, position in it, begin and end in the block."""
    first, last = parts[0], parts[0]
    for part in parts[1:]:
        if last.position + last.end - last.begin != part.position or part.file != first.file:
            yield first.file, first.position, first.begin, last.end
            first = part
        last = part
    yield first.file, first.position, first.begin, last.end


class Sources(dict[InputFile, Reader]):
    """The readers of one run, each opened with the ranges that will be read."""

    def __init__(self, tensors: Iterable[TensorAt], opened: Mapping[InputFile, Reader], stack: ExitStack) -> None:
        super().__init__(opened)
        for reader in opened.values():
            stack.callback(reader.close)
        self._stack = stack
        self._ranges: dict[InputFile, list[Range]] = {}
        for piece in chain.from_iterable(map(pieces_of, tensors)):
            if piece.file not in opened:
                self._ranges.setdefault(piece.file, []).append((piece.begin, piece.end))

    def __missing__(self, file: InputFile) -> Reader:
        self[file] = file.open(merge_ranges(self._ranges[file]))
        self._stack.callback(self[file].close)
        return self[file]


def is_remote(tensors: Iterable[TensorAt]) -> bool:
    """Return whether any of the tensors are fetched over a network."""
    one_of_each_type = {type(origin.file): origin.file for tensor in tensors for origin in stored_origins(tensor)}
    return any(isinstance(file, RemoteFile) for file in one_of_each_type.values())


_LARGE_NBYTES = 256 << 20  # of a tensor for which one thread would keep the others waiting at the end
_SHARE_NBYTES = 64 << 20  # that is worth another thread
_POLL_S = 0.05


class Team:
    """Threads that copy a run of one tensor.

    A digest takes the bytes in order: whoever has read a block waits until the block before it is hashed. Reading and
    writing, which take longer, run side by side.
    """

    def __init__(self, run: Run) -> None:
        (self._tensor,) = run.tensors
        self._run, self._blocks = run, enumerate(blocks_of(run))
        self._num_left = -(-(run.position % BLOCK_NBYTES + self._tensor.nbytes) // BLOCK_NBYTES)
        self._hasher, self._num_hashed = Hasher(), 0
        self._changed = threading.Condition()
        self._is_led = False

    def lead(self) -> bool:
        """Return whether the calling thread is the first that asks."""
        with self._changed:
            was_led, self._is_led = self._is_led, True
            return not was_led

    def help(self, progress: ByteCounter, stop: threading.Event) -> list[str] | None:
        """Copy blocks until none is left; return the tensor's digest if all of it is written now.

        Only one of the threads gets the digest.
        """
        buffer = aligned_buffer()
        with ExitStack() as stack:
            sources = Sources(self._run.tensors, {}, stack)
            while (claimed := self._claim()) is not None:
                number, (position, parts) = claimed
                for file, where, begin, end in merged_reads(parts):
                    sources[file].read_into(buffer[begin:end], where)
                if not self._await_turn(number, stop):
                    return None
                self._hash(buffer, parts)
                begin, end = parts[0].begin, parts[-1].end
                if self._run.output is not None:
                    self._run.output.write(buffer, begin, end, position)
                progress(end - begin)
                if self._is_last():
                    return [self._hasher.hexdigest()]
        return None

    def _claim(self) -> tuple[int, tuple[int, list[Chunk]]] | None:
        with self._changed:
            return next(self._blocks, None)

    def _await_turn(self, number: int, stop: threading.Event) -> bool:
        with self._changed:
            while self._num_hashed != number:
                if stop.is_set():
                    return False
                self._changed.wait(_POLL_S)
        return not stop.is_set()

    def _hash(self, buffer: memoryview, parts: Sequence[Chunk]) -> None:
        """Hash a block whose turn it is; with the last one, verify the tensor."""
        self._hasher.update(buffer[parts[0].begin : parts[-1].end])
        if parts[-1].ended is not None and self._run.verifies and self._tensor.blake3 is not None:
            check_digest(self._tensor, self._hasher.hexdigest())
        with self._changed:
            self._num_hashed += 1
            self._changed.notify_all()

    def _is_last(self) -> bool:
        with self._changed:
            self._num_left -= 1
            return not self._num_left


@dataclass(frozen=True, slots=True)
class SharedRun(Run):
    """A run of one large tensor, which several threads take, and copy as a team."""

    team: Team = field(kw_only=True)


def with_teams(runs: Sequence[Run], num_threads: int) -> list[Run]:
    """Return runs for threads to take: one of a large stored tensor as often as threads may copy it, with a team."""
    shared_runs: list[Run] = []
    for run in runs:
        nbytes = sum(tensor.nbytes for tensor in run.tensors)
        if num_threads < 2 or nbytes < _LARGE_NBYTES or len(run.tensors) > 1 or not _is_stored(run.tensors[0]):
            shared_runs.append(run)
        else:
            shared = SharedRun(run.tensors, run.first, run.output, run.position, run.verifies, team=Team(run))
            shared_runs += [shared] * min(num_threads, nbytes // _SHARE_NBYTES)
    return shared_runs


def _is_stored(tensor: TensorAt) -> bool:
    """Return whether a tensor's bytes can be read in any order: computed ones are made from front to back."""
    return all(isinstance(stored_file(piece.file), LocalFile) for piece in pieces_of(tensor))


class Progress(Protocol):
    """A callback for an operation's progress; it may raise to stop the operation."""

    def __call__(self, done_nbytes: int, total_nbytes: int, /) -> object:
        """Receive the bytes that are done, and an estimate of the total.

        It is called from worker threads, one call at a time, and `done_nbytes` never decreases. Since the total is an
        estimate, `done_nbytes` may end below or above it.
        """


def counting(progress: Progress | None, total_nbytes: int) -> ByteCounter:
    """Return a callback that takes the bytes of each step and reports their sum to `progress`."""
    if progress is None:
        return lambda nbytes: None
    if not callable(progress):
        problem = f"expected a function of bytes done and bytes in total, found {str(progress)[:80]}"
        raise UsageError(Parameter("progress"), problem, code="options.invalid-value")
    lock, done_nbytes = threading.Lock(), 0

    def count(nbytes: int) -> None:
        nonlocal done_nbytes
        with lock:
            done_nbytes += nbytes
            progress(done_nbytes, total_nbytes)

    progress(0, total_nbytes)
    return count
