"""How many threads and requests copy at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stores.cores import threads_for_ranks
from stores.prefetch import MEMORY_NBYTES, Prefetcher
from stores.uplink import NUM_PARTS, part_nbytes

__all__ = ["Parallelism", "Uploads", "Used"]

_MOST_PARTS = 64  # sent at a time: on a link of less than 1 MiB/s, each of them would count as stalled


@dataclass(slots=True)
class Used:
    """The most that a command used: threads that copied, and concurrent requests."""

    num_threads: int = 0
    num_streams: int = 0


class Uploads(NamedTuple):
    """How many objects are uploaded at a time, and how many parts of each."""

    num_objects: int
    num_parts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """How many threads copy, how many requests to remote stores run at a time, and the memory that those take.

    Without numbers, there are as many threads as cores, and as many requests as are found to help.
    """

    num_threads: int | None = None
    num_streams: int | None = None
    memory_nbytes: int = MEMORY_NBYTES
    used: Used = field(default_factory=Used, compare=False)

    def threads_for(self, num_items: int) -> int:
        """Return how many threads to start for so many pieces of work."""
        number = min(self.num_threads or threads_for_ranks(), max(1, num_items))
        self.used.num_threads = max(self.used.num_threads, number)
        return number

    def halved(self) -> Parallelism:
        """Return one with half of the memory, for one of two uses at a time."""
        return replace(self, memory_nbytes=self.memory_nbytes // 2)

    def uploads_of(self, objects_nbytes: Sequence[int], kept_nbytes: Sequence[int] = ()) -> Uploads:
        """Return how many of these objects to upload at a time, and how many parts of each.

        An open upload keeps one part more in memory than it sends. Fewer are open if then as much memory again has room
        for objects of `kept_nbytes`.
        """
        room = self.memory_nbytes // part_nbytes(max(objects_nbytes, default=0))
        num_parts = max(1, min(self.num_streams or _MOST_PARTS, room))
        num_objects = max(1, min(len(objects_nbytes), num_parts // NUM_PARTS, room // (NUM_PARTS + 1)))
        if kept_nbytes and (num_kept := self.memory_nbytes // max(kept_nbytes)):
            num_objects = min(num_objects, num_kept)
        found = Uploads(num_objects=num_objects, num_parts=max(1, min(num_parts, room - num_objects) // num_objects))
        self.used.num_streams = max(self.used.num_streams, found.num_objects * found.num_parts)
        return found

    def prefetcher(self, num_lanes: int, stop: threading.Event) -> Prefetcher:
        """Return a prefetcher for so many threads."""
        return Prefetcher(num_lanes, stop, num_streams=self.num_streams, memory_nbytes=self.memory_nbytes)

    def add(self, prefetcher: Prefetcher) -> None:
        """Record what a prefetcher used."""
        self.used.num_streams = max(self.used.num_streams, prefetcher.most_running)
