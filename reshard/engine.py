"""The one executor of plans: byte ranges from files to files, hashed on the way.

Memory: `NUM_THREADS` blocks of `BLOCK_NBYTES`, and a few hundred bytes for each tensor in the plan.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.digest import Hasher, digest_bytes
from manifests.errors import InputError
from manifests.safetensors import TensorEntry, header_template
from reshard.blocks import BLOCK_NBYTES, Io, OutputFile, aligned_buffer
from reshard.checkpoint import TensorAt
from reshard.journal import Journal
from reshard.plan import OutputShard
from stores.base import InputFile, Reader, merge_ranges
from stores.local import LocalFile

__all__ = ["NUM_THREADS", "WriteOptions", "WrittenShard", "hash_tensors", "write_shards"]

NUM_THREADS = 2  # one from each end of the plan, see `_carry_out`
_MOST_OPEN = 128  # output files open at a time
_RUN_NBYTES = 64 << 20  # a run is one thread's piece of work: whole tensors, about this long

Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How shards reach the disk. Without `sync`, the kernel flushes them when it likes, as after `cp`."""

    io: Io = "direct"
    sync: bool = True
    journal: Journal | None = None
    progress: Progress = lambda nbytes: None


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShard:
    """A shard on disk: its size, its digest, and its tensors' hex digests by FQN."""

    path: str
    nbytes: int
    digest: str
    tensor_digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor on its way, and where its bytes begin in the output file (None: hashed, not written)."""

    origin: TensorAt
    output: OutputFile | None
    position: int


def write_shards(
    shards: Sequence[OutputShard], folder: Path, options: WriteOptions | None = None
) -> tuple[WrittenShard, ...]:
    """Write shards below `folder`.

    Every byte is read once and hashed as it passes; a tensor whose digest is known must match it.

    Raises:
        InputError: a source file is shorter than planned, or a tensor's bytes are not what its
            digest says.
    """
    options = options or WriteOptions()
    written: list[WrittenShard] = []
    for first in range(0, len(shards), _MOST_OPEN):
        written += _write_together(shards[first : first + _MOST_OPEN], folder, options)
    return tuple(written)


def hash_tensors(tensors: Sequence[TensorAt], progress: Progress = lambda nbytes: None) -> tuple[str, ...]:
    """Give the hex digest of each tensor's bytes; known digests are not consulted."""
    return tuple(_carry_out([_Piece(_unknown(tensor), None, 0) for tensor in tensors], progress))


def _write_together(shards: Sequence[OutputShard], folder: Path, options: WriteOptions) -> list[WrittenShard]:
    with ExitStack() as stack:
        files, pieces = [], []
        for shard in shards:
            path = folder / shard.path
            path.parent.mkdir(parents=True, exist_ok=True)
            files.append(OutputFile(path, shard.nbytes, options.io))
            stack.callback(files[-1].close)
            pieces += _pieces(shard, files[-1])
        digests = iter(_carry_out(pieces, options.progress, options.journal))
        return [_finish(shard, file, digests, sync=options.sync) for shard, file in zip(shards, files, strict=True)]


def _finish(shard: OutputShard, file: OutputFile, digests: Iterator[str], *, sync: bool) -> WrittenShard:
    """Put the header before the data, now that the digests are known."""
    named = {entry.name: next(digests) for entry in _in_data_order(shard.entries)}
    header = header_template(shard.entries, {}, named) if shard.with_digests else shard.header
    file.finish(header, sync=sync)
    return WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=digest_bytes(header), tensor_digests=named)


def _in_data_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    return sorted(entries, key=lambda entry: (entry.begin, entry.end))


def _pieces(shard: OutputShard, file: OutputFile) -> list[_Piece]:
    """Give a shard's tensors in the order of their bytes in it."""
    data_begin = len(shard.header)
    origins = dict(zip((entry.name for entry in shard.entries), shard.origins, strict=True))
    return [_Piece(origins[entry.name], file, data_begin + entry.begin) for entry in _in_data_order(shard.entries)]


def _carry_out(pieces: Sequence[_Piece], progress: Progress, journal: Journal | None = None) -> list[str]:
    """Move and hash every piece; give the hex digests in the same order. The first failure stops all.

    What the journal says an earlier run has done is read again, and done again only where it differs.

    One thread takes runs from the front, the other from the back, so that they meet in one file only
    at the end: two threads that write one file wait for each other.
    """
    runs = deque(enumerate(_runs(pieces)))
    digests: dict[int, list[str]] = {}
    stop = threading.Event()

    def work(take: Callable[[], tuple[int, list[_Piece]]]) -> None:
        while not stop.is_set():
            try:
                number, run = take()
            except IndexError:  # none left
                return
            digests[number] = _carry_journaled(run, progress, stop, journal)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        try:
            jobs = [pool.submit(work, take) for take in (runs.popleft, runs.pop)]
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            for job in done:
                job.result()
        finally:
            stop.set()
    return [digest for number in sorted(digests) for digest in digests[number]]


def _runs(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Cut pieces into runs of whole tensors that lie one after the other in one file."""
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


def _carry_journaled(
    run: list[_Piece], progress: Progress, stop: threading.Event, journal: Journal | None
) -> list[str]:
    output, position = run[0].output, run[0].position
    if journal is None or output is None:
        return _carry_run(run, progress, stop)
    name = output.path.relative_to(journal.path.parent).as_posix()
    known = journal.digests(name, position)
    if known is not None:
        there = [
            _Piece(replace(_unknown(piece.origin), file=LocalFile(output.path), begin=piece.position), None, 0)
            for piece in run
        ]
        if _carry_run(there, progress, stop) == known:
            return known
    digests = _carry_run(run, progress, stop)
    if not stop.is_set():
        journal.record(name, position, digests)
    return digests


def _unknown(tensor: TensorAt) -> TensorAt:
    return replace(tensor, digest=None)


def _carry_run(run: list[_Piece], progress: Progress, stop: threading.Event) -> list[str]:
    """Fill, hash and write one block after the other; a block may hold the ends of several tensors."""
    buffer, output = aligned_buffer(), run[0].output
    digests: list[str] = []
    # Block and file position are equal modulo a block, so that whole sectors can be written directly.
    position = run[0].position
    begin = end = position % BLOCK_NBYTES
    with ExitStack() as stack:
        sources = _Sources(run, stack)
        for piece in run:
            origin, hasher, moved = piece.origin, Hasher(), 0
            while moved < origin.nbytes:
                if stop.is_set():
                    return []
                count = min(BLOCK_NBYTES - end, origin.nbytes - moved)
                part = buffer[end : end + count]
                sources[origin.file].read_into(part, origin.begin + moved)
                hasher.update(part)
                moved, end = moved + count, end + count
                if end == BLOCK_NBYTES:
                    if output is not None:
                        output.write(buffer, begin, end, position)
                    progress(end - begin)
                    position, begin, end = position + end - begin, 0, 0
            digests.append(hasher.hexdigest())
            _check(origin, digests[-1])
        if output is not None:
            output.write(buffer, begin, end, position)
        progress(end - begin)
    return digests


class _Sources(dict[InputFile, Reader]):
    """The readers of one run, each told beforehand which ranges will be read."""

    def __init__(self, run: list[_Piece], stack: ExitStack) -> None:
        super().__init__()
        self._run, self._stack = run, stack

    def __missing__(self, file: InputFile) -> Reader:
        origins = (piece.origin for piece in self._run if piece.origin.file == file)
        self[file] = file.open(merge_ranges((origin.begin, origin.begin + origin.nbytes) for origin in origins))
        self._stack.callback(self[file].close)
        return self[file]


def _check(origin: TensorAt, found: str) -> None:
    if origin.digest is not None and found != origin.digest:
        raise InputError(
            f"{origin.file}: {origin.name!r}",
            f"expected blake3:{origin.digest}, found blake3:{found}",
            "the shard was changed or damaged after it was written; pack it again from its source",
        )
