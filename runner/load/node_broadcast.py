"""Shards that several nodes cache: one of the nodes reads each from the store and broadcasts it to the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from manifests.errors import UnreachableError
from manifests.index import share_evenly
from manifests.schema import Shard
from stores.base import Range

_ROUND_NBYTES = 16 << 20  # of a broadcast; one more byte says whether the sender could read them


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A shard that a rank copies to its node's cache, or has there."""

    path: str
    nbytes: int
    is_cached: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A shard that the `receivers` lack, and the rank from whose node it comes, which has it or reads it first."""

    path: str
    sender: int
    receivers: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted((self.sender, *self.receivers)))


def plan_transfers(wanted: Mapping[int, Sequence[Wanted]]) -> tuple[Transfer, ...]:
    """Return the transfers of all shards that ranks would otherwise read from the store more than once, by path.

    `wanted` has the shards of each rank. One that is in a cache is sent from there. Each of the others is read from
    the store by one rank; the bytes are distributed evenly.
    """
    ranks, nbytes, cached = dict[str, list[int]](), dict[str, int](), dict[str, int]()
    for rank, shards in sorted(wanted.items()):
        for shard in shards:
            nbytes[shard.path] = shard.nbytes
            lacking = ranks.setdefault(shard.path, [])
            if shard.is_cached:
                cached.setdefault(shard.path, rank)
            else:
                lacking.append(rank)
    read = sorted((path for path in ranks if path not in cached), key=lambda path: (-nbytes[path], path))
    readers = share_evenly(((path, nbytes[path]) for path in read), max(wanted, default=0) + 1, ranks)
    transfers = []
    for path, sender in sorted({**cached, **readers}.items()):
        if receivers := tuple(rank for rank in ranks[path] if rank != sender):
            transfers.append(Transfer(path=path, sender=sender, receivers=receivers))
    return tuple(transfers)


def open_groups(transfers: Iterable[Transfer], timeout_s: float) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Open a gloo group for each set of ranks of this rank's transfers, by the set. Only their ranks take part."""
    sets = sorted({transfer.ranks for transfer in transfers})  # in one order on all ranks: sets overlap
    timeout = timedelta(seconds=timeout_s)
    return {
        ranks: dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True) for ranks in sets
    }


def send(path: Path, shard: Shard, group: dist.ProcessGroup) -> None:
    """Broadcast a cached shard to the other ranks of a group, in rounds of bounded size.

    Raises:
        UnreachableError: it cannot be read; the receivers learn that, too.
    """
    buffer = torch.empty(min(_ROUND_NBYTES, shard.nbytes) + 1, dtype=torch.uint8)
    for begin in range(0, shard.nbytes, _ROUND_NBYTES):
        count = min(_ROUND_NBYTES, shard.nbytes - begin)
        failure = _read_round(path, begin, buffer.numpy().data[:count])
        buffer[count] = failure is None
        dist.broadcast(buffer[: count + 1], src=dist.get_rank(), group=group)
        if failure is not None:
            raise UnreachableError(str(path), f"cannot be read: {failure}", code="store.unreadable") from failure


def _read_round(path: Path, begin: int, into: memoryview) -> OSError | None:
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            if file.readinto(into) != len(into):
                return OSError(f"{path} has been cut short")
    except OSError as error:
        return error
    return None


@dataclass(slots=True)
class ReceivedFile:
    """A shard that another rank broadcasts, read once from front to back, except for its first bytes.

    Once its reading has ended or failed, `finish` takes part in the rounds that are left.
    """

    path: str
    nbytes: int
    sender: int
    group: dist.ProcessGroup
    fingerprint: str = ""
    _rounds: list[tuple[int, memoryview]] = field(default_factory=list)  # those that may still be read
    _received_nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.path} from rank {self.sender}"

    def open(self, ranges: Sequence[Range]) -> ReceivedFile:
        return self

    def close(self) -> None:
        """Let the next reader continue."""

    def read_into(self, part: memoryview, position: int) -> None:
        while self._received_nbytes < position + len(part):
            self._receive()
        self._rounds = [(begin, data) for begin, data in self._rounds if begin + len(data) > position]
        for begin, data in self._rounds:
            low, high = max(position, begin), min(position + len(part), begin + len(data))
            if low < high:
                part[low - position : high - position] = data[low - begin : high - begin]

    def finish(self) -> None:
        self._rounds = []
        while self._received_nbytes < self.nbytes:
            self._receive()
            self._rounds = []

    def _receive(self) -> None:
        """Take part in the next round."""
        begin, count = self._received_nbytes, min(_ROUND_NBYTES, self.nbytes - self._received_nbytes)
        buffer = torch.empty(count + 1, dtype=torch.uint8)
        dist.broadcast(buffer, src=self.sender, group=self.group)
        self._received_nbytes += count
        if not buffer[count]:
            self._received_nbytes = self.nbytes
            raise UnreachableError(str(self), "cannot be read on its node", code="store.unreadable")
        self._rounds.append((begin, buffer.numpy().data[:count]))
