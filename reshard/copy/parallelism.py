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

    @property
    def most_threads(self) -> int:
        """How many threads to start at most."""
        return self.num_threads or threads_for_ranks()

    def threads_for(self, num_items: int) -> int:
        """Return how many threads to start for so many pieces of work."""
        number = min(self.most_threads, max(1, num_items))
        self.used.num_threads = max(self.used.num_threads, number)
        return number

    def part(self, number: int, of: int) -> Parallelism:
        """Return one with a part of the memory, for one of several uses at a time."""
        return replace(self, memory_nbytes=self.memory_nbytes * number // of)

    def uploads_of(self, objects_nbytes: Sequence[int]) -> Uploads:
        """Return how many of these objects to upload at a time, and how many parts of each.

        An open upload keeps one part more in memory than it sends.
        """
        room = self.memory_nbytes // part_nbytes(max(objects_nbytes, default=0))
        num_parts = max(1, min(self.num_streams or _MOST_PARTS, room))
        num_objects = max(1, min(len(objects_nbytes), num_parts // NUM_PARTS, room // (NUM_PARTS + 1)))
        return self._used(num_objects, max(1, min(num_parts, room - num_objects) // num_objects))

    def uploads_of_kept(self, objects_nbytes: Sequence[int]) -> Uploads | None:
        """Return how many of these objects to have in memory at a time, and how many parts of each to send.

        Half of those are being read, the others sent, in as many parts at a time. None: the longest does not fit.
        """
        longest = max(objects_nbytes)
        num_objects = min(len(objects_nbytes), self.memory_nbytes // (longest + part_nbytes(longest)))
        if self.num_streams is not None:
            num_objects = min(num_objects, self.num_streams)
        if not num_objects:
            return None
        num_parts = max(1, (self.num_streams or 2 * _MOST_PARTS) // num_objects)
        return self._used(num_objects, min(num_parts, _MOST_PARTS))

    def _used(self, num_objects: int, num_parts: int) -> Uploads:
        self.used.num_streams = max(self.used.num_streams, num_objects * num_parts)
        return Uploads(num_objects=num_objects, num_parts=num_parts)

    def prefetcher(self, num_lanes: int, stop: threading.Event) -> Prefetcher:
        """Return a prefetcher for so many threads."""
        return Prefetcher(num_lanes, stop, num_streams=self.num_streams, memory_nbytes=self.memory_nbytes)

    def add(self, prefetcher: Prefetcher) -> None:
        """Record what a prefetcher used."""
        self.used.num_streams = max(self.used.num_streams, prefetcher.most_running)
