"""The runs of one thread, whose remote bytes are requested while earlier ones are copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reshard.copy.direct_io import OutputFile
from reshard.copy.journal import Journal
from reshard.copy.runs import Run
from reshard.tensors.slices import pieces_of
from stores.base import InputFile
from stores.prefetch import Lane, PlannedReader, Prefetcher
from stores.workers import Take


class Taken(NamedTuple):
    """A run that a thread has taken.

    `known` are the digests of what an interrupted run of the command has written of it, `readers` those of remote
    files.
    """

    run: Run
    known: bytes | None
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
        for run, known, readers in tuple(self._taken):
            yield Taken(run, known, {file: reader.keeping() for file, reader in readers.items()})

    def _more(self) -> bool:
        """Take another run, unless the last is one of local files alone; return whether yet another may follow."""
        if self._taken and self._taken[-1].known is None and not self._taken[-1].readers:
            return False  # what nobody needs ahead is left to other threads
        taken = self._take_one()
        return taken is not None and bool(taken.readers)

    def _take_one(self) -> Taken | None:
        run = self._take()
        if run is None:
            return None
        known = _known_digests(run, self._journal)
        ranges = ((one.file, one.begin, one.end) for tensor in run.tensors for one in pieces_of(tensor))
        self._taken.append(Taken(run, known, self._lane.plan(ranges) if known is None else {}))
        return self._taken[-1]


def _known_digests(run: Run, journal: Journal | None) -> bytes | None:
    if journal is None or not isinstance(run.output, OutputFile):
        return None
    return journal.digests(run.output.path.relative_to(journal.folder).as_posix(), run.position)
