"""The executor of plans: it copies byte ranges from files to files, hashing them on the way.

Memory: a block of `BLOCK_NBYTES` per thread, a few hundred bytes for each tensor of a run and a hundred for its digest,
and what `Parallelism` allows to requests if the source is remote.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from manifests.digest import digest_bytes
from reshard.copy.journal import Journal
from reshard.copy.parallelism import Parallelism
from reshard.copy.runs import ByteCounter, Output, Run, SharedRun, copy_run, is_remote, on_disk, split_run, with_teams
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import check_digest
from reshard.tensors.slices import pieces_of
from stores.base import InputFile
from stores.bundles import TensorAt
from stores.direct_io import Io, OutputFile
from stores.prefetch import Lane, PlannedReader, Prefetcher
from stores.workers import Take, share_out

_MAX_OPEN = 128  # output files open at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How shards are written. Without `sync`, flushing them is left to the kernel, as after `cp`.

    `written` is called by several threads, with each run that is in its file.
    """

    io: Io = "direct"
    sync: bool = True
    journal: Journal | None = None
    progress: ByteCounter = lambda nbytes: None
    written: Callable[[Run], object] = lambda run: None
    parallelism: Parallelism = field(default_factory=Parallelism)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenShard:
    """A shard on disk."""

    path: str
    nbytes: int
    digest: str


def write_shards(
    shards: Sequence[OutputShard], folder: Path, options: WriteOptions | None = None
) -> tuple[WrittenShard, ...]:
    """Write shards below `folder`.

    Every byte is read once and hashed on the way; known digests are verified.
    """
    options = options or WriteOptions()
    written: list[WrittenShard] = []
    for first in range(0, len(shards), _MAX_OPEN):
        written += _write_together(shards[first : first + _MAX_OPEN], folder, options)
    return tuple(written)


def hash_tensors(tensors: Sequence[TensorAt], progress: ByteCounter = lambda nbytes: None) -> list[str]:
    """Return the hex digest of each tensor's bytes; known digests are ignored."""
    return _execute(tuple(split_run(Run(tensors, 0, verifies=False))), len(tensors), WriteOptions(progress=progress))


class InOrder:
    """Reads a shard's data sequentially, in this thread: to write it, and before, if asked, to hash it."""

    def __init__(self, shard: OutputShard, progress: ByteCounter, prefetcher: Prefetcher) -> None:
        self.progress, self._prefetcher = progress, prefetcher
        self._ahead = self._reading(shard.in_data_order, shard.header_nbytes)
        self._is_hashed = False

    def hash(self, tensors: Sequence[TensorAt]) -> list[str]:
        """Return the digest of each of these tensors, of which none is verified."""
        return self._hash(self._reading(tensors), self.progress)

    def hash_and_keep(self) -> list[str]:
        """Verify known digests and return those of all tensors, whose bytes stay in memory until they are written."""
        self._is_hashed = True
        return self._hash(self._ahead.read_before(), lambda nbytes: None, verifies=True)

    def write(self, output: Output, digests: Sequence[str] | None = None) -> None:
        """Write the data to `output`, and verify the digests if they are passed and were not computed from memory."""
        for run, _, readers in self._ahead:
            run = replace(run, output=output, is_hashed=self._is_hashed)
            written = copy_run(run, readers, self.progress, self._prefetcher)
            if digests is not None and not self._is_hashed:
                for tensor, digest, expected in zip(run.tensors, written, digests[run.first :], strict=False):
                    check_digest(tensor, digest, expected)

    def _hash(self, ahead: Iterable[Taken], progress: ByteCounter, *, verifies: bool = False) -> list[str]:
        digests: list[str] = []
        for run, _, readers in ahead:
            digests += copy_run(replace(run, verifies=verifies), readers, progress, self._prefetcher)
        if self._prefetcher.stop.is_set():
            raise CancelledError
        return digests

    def _reading(self, tensors: Sequence[TensorAt], position: int = 0) -> Ahead:
        runs = iter(split_run(Run(tensors, 0, position=position)))
        return Ahead(lambda: next(runs, None), self._prefetcher, sum(tensor.nbytes for tensor in tensors))


def _write_together(shards: Sequence[OutputShard], folder: Path, options: WriteOptions) -> list[WrittenShard]:
    firsts = list(accumulate((len(shard.origins) for shard in shards), initial=0))
    with ExitStack() as stack:
        files, runs = list[OutputFile](), list[Run]()
        for shard, first in zip(shards, firsts, strict=False):
            path = folder / shard.path
            path.parent.mkdir(parents=True, exist_ok=True)
            files.append(OutputFile(path, shard.nbytes, options.io, is_synced=options.sync))
            stack.callback(files[-1].close)
            runs += split_run(Run(shard.in_data_order, first, files[-1], shard.header_nbytes))
        digests = _execute(runs, firsts[-1], options)
        return [
            _finish(shard, file, digests[first:last], sync=options.sync)
            for shard, file, (first, last) in zip(shards, files, pairwise(firsts), strict=True)
        ]


def _finish(shard: OutputShard, file: OutputFile, digests: Sequence[str], *, sync: bool) -> WrittenShard:
    """Write the header, now that the digests are known."""
    assert all(digests), f"{shard.path}: a tensor was not copied"
    header = shard.header_with(digests)
    file.finish(header, sync=sync)
    return WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=digest_bytes(header))


def _execute(runs: Sequence[Run], num_tensors: int, options: WriteOptions) -> list[str]:
    """Copy and hash every run; return the tensors' digests. The first failure stops all.

    What an interrupted run has written, by the journal, is read and hashed, and written again only if it differs.
    """
    digests, stop = [""] * num_tensors, threading.Event()
    # In order, a remote file is complete soon after its first bytes, and can be hashed meanwhile.
    in_order = is_remote(tensor for run in runs for tensor in run.tensors)
    if not in_order:
        runs = with_teams(runs, options.parallelism.most_threads)
    num_threads = options.parallelism.threads_for(len(runs))
    of_thread_nbytes = sum(tensor.nbytes for run in runs for tensor in run.tensors) // num_threads
    tensors = (tensor for run in runs for tensor in run.tensors)
    with options.parallelism.prefetcher(num_threads, stop, tensors) as prefetcher:

        def copy(take: Take[Run], stop: threading.Event) -> None:
            for taken in Ahead(take, prefetcher, of_thread_nbytes, options.journal):
                if stop.is_set():
                    return
                of_run = _copy_or_reuse(taken, options, prefetcher)
                if of_run is None:  # others of its team have not finished, or have done it all
                    continue
                digests[taken.run.first : taken.run.first + len(of_run)] = of_run
                if not stop.is_set():
                    options.written(taken.run)

        share_out(runs, copy, num_threads, stop, in_order=in_order)
    options.parallelism.add(prefetcher)
    return digests


def _copy_or_reuse(taken: Taken, options: WriteOptions, prefetcher: Prefetcher) -> list[str] | None:
    """Copy a run, unless the journal has it and the bytes on disk match.

    Return its digests, or None if another thread of its team does.
    """
    run, recorded, readers = taken
    output, journal, team = run.output, options.journal, run.team if isinstance(run, SharedRun) else None
    copy, stop = partial(copy_run, progress=options.progress, prefetcher=prefetcher), prefetcher.stop
    if recorded is not None:
        if team is not None and not team.lead():
            return None
        if isinstance(output, OutputFile) and copy(on_disk(run, output), {}) == recorded:
            return recorded
        team = None
    digests = copy(run, readers) if team is None else team.help(options.progress, stop)
    if digests is not None and journal is not None and isinstance(output, OutputFile) and not stop.is_set():
        journal.record(output.path.relative_to(journal.folder).as_posix(), run.position, digests)
    return digests


class Taken(NamedTuple):
    """A run that a thread has taken.

    `digests` are those of what an interrupted run of the command has written of it, `readers` those of remote files.
    """

    run: Run
    digests: list[str] | None
    readers: Mapping[InputFile, PlannedReader]


class Ahead:
    """Takes runs as long as the thread's share of the memory has room for their requests; yields them in order.

    They are expected to be of `nbytes` in all.
    """

    def __init__(self, take: Take[Run], prefetcher: Prefetcher, nbytes: int, journal: Journal | None = None) -> None:
        self._take, self._journal = take, journal
        self._lane = Lane(prefetcher, self._more, nbytes)
        self._taken = deque[Taken]()

    def __iter__(self) -> Iterator[Taken]:
        while self._taken or self._take_one() is not None:
            self._lane.fill()
            yield self._taken.popleft()

    def read_before(self) -> Iterator[Taken]:
        """Yield all runs, with readers that keep the bytes in memory, from where `__iter__` reads them again."""
        while self._take_one() is not None:
            pass
        self._lane.fill()
        for run, digests, readers in tuple(self._taken):
            yield Taken(run, digests, {file: reader.keeping() for file, reader in readers.items()})

    def _more(self) -> bool:
        """Take another run, unless the last is one of local files alone; return whether yet another may follow."""
        if self._taken and self._taken[-1].digests is None and not self._taken[-1].readers:
            return False  # what nobody needs ahead is left to other threads
        taken = self._take_one()
        return taken is not None and bool(taken.readers)

    def _take_one(self) -> Taken | None:
        run = self._take()
        if run is None:
            return None
        digests = _digests_in(self._journal, run)
        ranges = ((piece.file, piece.begin, piece.end) for tensor in run.tensors for piece in pieces_of(tensor))
        self._taken.append(Taken(run, digests, self._lane.plan(ranges) if digests is None else {}))
        return self._taken[-1]


def _digests_in(journal: Journal | None, run: Run) -> list[str] | None:
    if journal is None or not isinstance(run.output, OutputFile):
        return None
    return journal.digests(run.output.path.relative_to(journal.folder).as_posix(), run.position)
