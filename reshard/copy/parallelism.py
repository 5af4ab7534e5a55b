"""How many threads and requests copy at a time, and how many objects are uploaded."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from manifests.errors import Parameter, check_count
from reshard.copy.runs import is_remote
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.lazy import DerivedFile
from reshard.tensors.slices import pieces_of
from stores.address import is_url
from stores.bundles import TensorAt
from stores.objects.uplink import NUM_PARTS, part_nbytes
from stores.open import Address
from stores.prefetch import MEMORY_NBYTES, STREAM_NBYTES, Prefetcher, RemoteFile
from stores.workers import threads_for_ranks

_MANY_STREAMS = 128
_LEAST_STREAM_NBYTES = 2 << 20

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

    def __post_init__(self) -> None:
        for name in ("num_threads", "num_streams"):
            if (number := getattr(self, name)) is not None:
                check_count(Parameter(f"parallelism.{name}"), number, least=0)

    @property
    def most_threads(self) -> int:
        """How many threads to start at most."""
        return self.num_threads or threads_for_ranks()

    def threads_for(self, num_items: int) -> int:
        """Return how many threads to start for so many pieces of work."""
        number = min(self.most_threads, max(1, num_items))
        self.used.num_threads = max(self.used.num_threads, number)
        return number

    def computing(self) -> Parallelism:
        """Return one with two threads more than cores, by default: some compute while others wait for the disk."""
        return replace(self, num_threads=self.num_threads or threads_for_ranks() + 2)

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
        self,
        num_threads: int,
        stop: threading.Event,
        tensors: Iterable[TensorAt],
        *,
        stream_nbytes: int = STREAM_NBYTES,
        reuses: bool = True,
    ) -> Prefetcher:
        """Return a prefetcher for threads that read these tensors, with a stream for each `stream_nbytes` of memory."""
        # A thread reads as much of what derived tensors are made of as its lane has of the others meanwhile.
        are_derived = any(isinstance(piece.file, DerivedFile) for tensor in tensors for piece in pieces_of(tensor))
        return Prefetcher(
            num_threads * (2 if are_derived else 1),
            stop,
            num_streams=self.num_streams,
            memory_nbytes=self.memory_nbytes,
            stream_nbytes=stream_nbytes,
            reuses=reuses,
        )

    def add(self, prefetcher: Prefetcher) -> None:
        """Record what a prefetcher used."""
        self.used.num_streams = max(self.used.num_streams, prefetcher.most_running)


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadPlan:
    """How shards are uploaded: how many at a time, and the memory for reading a remote source meanwhile.

    A shard's header comes first, and has its digests. Shards that are `kept` stay in memory from the reading that
    computes these until they are sent, while the next `num_readers` are read, half of them if not all fit at a time;
    otherwise, tensors without a known digest are read twice.
    """

    uploads: Uploads
    reading: Parallelism
    num_readers: int
    is_kept: bool = False

    @property
    def stream_nbytes(self) -> int:
        """The memory for each request: shorter ones where a few shards are read whole, each as fast as can be."""
        share = self.reading.memory_nbytes // _MANY_STREAMS
        return min(STREAM_NBYTES, max(_LEAST_STREAM_NBYTES, share)) if self.is_kept else STREAM_NBYTES

    @classmethod
    def of(cls, shards: Sequence[OutputShard], parallelism: Parallelism) -> UploadPlan:
        sizes = [shard.nbytes for shard in shards]
        if _can_be_kept(shards) and (uploads := parallelism.uploads_of_kept(sizes)):
            is_one_round = uploads.num_objects == len(shards)
            num_readers = uploads.num_objects if is_one_round else (uploads.num_objects + 1) // 2
            reading = parallelism.within(num_readers * max(sizes))
            return cls(uploads=uploads, reading=reading, num_readers=num_readers, is_kept=True)
        if is_remote(origin for shard in shards for origin in shard.origins):
            parallelism = parallelism.within(parallelism.memory_nbytes // 2)
        uploads = parallelism.uploads_of(sizes)
        return cls(uploads=uploads, reading=parallelism, num_readers=uploads.num_objects)

    def read_before(self, shard: OutputShard) -> list[TensorAt]:
        """Return the tensors of a shard that are read twice."""
        return [] if self.is_kept else without_digest(shard)


def read_twice(shards: Sequence[OutputShard], out: Address, parallelism: Parallelism) -> list[TensorAt]:
    """Return the tensors that are read twice when `shards` are written to `out`."""
    if not is_url(out):
        return []
    plan = UploadPlan.of(shards, parallelism)
    return [tensor for shard in shards for tensor in plan.read_before(shard)]


def _can_be_kept(shards: Sequence[OutputShard]) -> bool:
    """Return whether shards must be hashed before they are sent, and all of them are fetched in planned requests."""
    origins = (origin for shard in shards for origin in shard.origins)
    files = {type(piece.file): piece.file for origin in origins for piece in pieces_of(origin)}
    return any(map(without_digest, shards)) and all(isinstance(file, RemoteFile) for file in files.values())


def without_digest(shard: OutputShard) -> list[TensorAt]:
    """Return the tensors to hash before a shard is uploaded, since its header comes first and has their digests."""
    return [origin for origin in shard.origins if origin.blake3 is None] if shard.with_digests else []
