"""How many threads and requests copy at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from stores.objects.uplink import NUM_PARTS, part_nbytes
from stores.prefetch import MEMORY_NBYTES, STREAM_NBYTES, Prefetcher
from stores.workers import threads_for_ranks

_MOST_SENT_NBYTES = 512 << 20  # in parts at a time: on a link of less than 1 MiB/s, each would count as stalled


@dataclass(slots=True)
class Used:
    """The most that a command used: threads that copied, and concurrent requests."""

    num_threads: int = 0
    num_streams: int = 0


class Uploads(NamedTuple):
    """How many objects are uploaded at a time, and in how many rounds the parts of each are sent."""

    num_objects: int
    num_rounds: int

    def num_parts(self, nbytes: int) -> int:
        """Return how many parts of an object of `nbytes` to send at a time."""
        return max(1, -(-_num_upload_parts(nbytes) // self.num_rounds))


def _num_upload_parts(nbytes: int) -> int:
    return -(-nbytes // part_nbytes(nbytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """How many threads copy, how many requests to remote stores run at a time, and the memory that those take.

    None: as many threads (`num_threads`) as cores, and as many requests (`num_streams`) as are found to help.

    Units: `memory_nbytes` in bytes.
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

    def within(self, memory_nbytes: int) -> Parallelism:
        """Return one with this part of the memory, for one of several uses at a time."""
        return replace(self, memory_nbytes=memory_nbytes)

    def uploads_of(self, objects_nbytes: Sequence[int]) -> Uploads:
        """Return how many of these objects to upload at a time, so that all have as many rounds of parts.

        An open upload keeps one part more in memory than it sends.
        """
        longest = part_nbytes(max(objects_nbytes, default=0))
        room = self.memory_nbytes // longest
        num_parts = max(1, min(self.num_streams or _MOST_SENT_NBYTES // longest, room))
        num_objects = max(1, min(len(objects_nbytes), num_parts // NUM_PARTS, room // (NUM_PARTS + 1)))
        return self._uploads(objects_nbytes, num_objects, max(num_objects, min(num_parts, room - num_objects)))

    def uploads_of_kept(self, objects_nbytes: Sequence[int]) -> Uploads | None:
        """Return how many of these objects to have in memory at a time, while they are read, then sent.

        None: not even the longest one fits.
        """
        nbytes = accumulate(sorted(objects_nbytes, reverse=True))
        num_objects = sum(total <= self.memory_nbytes for total in nbytes)
        if not num_objects:
            return None
        most = self.num_streams or 2 * _MOST_SENT_NBYTES // part_nbytes(max(objects_nbytes))  # half are being read
        return self._uploads(objects_nbytes, min(num_objects, most), most)

    def _uploads(self, objects_nbytes: Sequence[int], num_objects: int, most_parts: int) -> Uploads:
        counts = [_num_upload_parts(nbytes) for nbytes in sorted(objects_nbytes, reverse=True)[:num_objects]]
        num_rounds = max(1, sum(counts) // most_parts)
        while (num_parts := sum(-(-count // num_rounds) for count in counts)) > most_parts:
            num_rounds += 1
        self.used.num_streams = max(self.used.num_streams, num_parts)
        return Uploads(num_objects=num_objects, num_rounds=num_rounds)

    def prefetcher(
        self, num_lanes: int, stop: threading.Event, stream_nbytes: int = STREAM_NBYTES, *, reuses: bool = True
    ) -> Prefetcher:
        """Return a prefetcher for so many threads, with a stream for each `stream_nbytes` of memory."""
        return Prefetcher(
            num_lanes,
            stop,
            num_streams=self.num_streams,
            memory_nbytes=self.memory_nbytes,
            stream_nbytes=stream_nbytes,
            reuses=reuses,
        )

    def add(self, prefetcher: Prefetcher) -> None:
        """Record what a prefetcher used."""
        self.used.num_streams = max(self.used.num_streams, prefetcher.most_running)
