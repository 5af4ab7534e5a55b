"""The local cache of bundles (`--stage-to-local`): a node's ranks copy what they read to its own disk first.

Shards that several nodes need are read from the store by one of them, which broadcasts them to the others. Nodes may
have copies of the manifest: it is checked that all ranks read the same one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from manifests.command.sizes import show_bytes
from manifests.errors import ManifestError, ShardError, UnreachableError
from manifests.index import share_evenly
from manifests.optimizer_state import stored_kinds
from manifests.schema import WEIGHTS, Holds, Manifest, Shard
from runner.bundle.cache_folder import CacheFolder, assign_shards, check_cacheable, node_folder, shards_of
from runner.bundle.packed import Packed, fetch, name_of, open_packed
from runner.config.flags import TrainOptions
from runner.distributed.fail_together import from_all_ranks, from_rank_0, raise_on_all_ranks
from runner.distributed.rounds import in_rounds, is_true_for_all
from runner.distributed.watchdog import StallTimer
from runner.distributed.world import World
from runner.parallel.mesh import Mesh
from stores.base import Range
from stores.bundles import Bundles
from stores.open import ReadManifest

logger = logging.getLogger("runner")
Origin = Literal["node", "store"]
Groups = Mapping[tuple[int, ...], dist.ProcessGroup]
_ROUND_NBYTES = 16 << 20  # of a broadcast; one more byte says whether the sender could read them
_SPARE_S = 10.0  # groups time out later than a disk, so that the error is about the disk


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheReport:
    """What one rank copied to its node's disk, in `copy_s` seconds, and what of its part was already cached."""

    nbytes: int
    reused_nbytes: int
    num_damaged: int  # cached shards that were damaged, and copied again
    copy_s: float
    peer_nbytes: int = 0  # of those that were copied, bytes from other nodes

    def followed_by(self, repair: CacheReport) -> CacheReport:
        """Return the sum of this report and that of a repair."""
        return replace(
            self,
            nbytes=self.nbytes + repair.nbytes,
            reused_nbytes=max(0, self.reused_nbytes - repair.nbytes),
            num_damaged=self.num_damaged + repair.num_damaged,
            copy_s=self.copy_s + repair.copy_s,
        )


def local_cache_of(
    launched: Packed, origin: Packed, options: TrainOptions, mesh: Mesh, world: World, *, has_moments: bool
) -> LocalCache | None:
    """Return this node's cache of a checkpoint; None without --stage-to-local."""
    if options.stage_to_local is None:
        return None
    check_cacheable(origin.manifest, origin.where)
    path = node_folder(options.stage_to_local, name_of(origin.location), origin.read.digest)
    modules = _modules_on_node(launched.manifest, mesh, world)
    holds = stored_kinds(origin.manifest) if has_moments else (WEIGHTS,)
    return LocalCache(origin.bundles, CacheFolder(path=path, limit_s=options.timeout_s), modules, holds, world)


def fetch_to_cache(read: ReadManifest, options: TrainOptions, world: World) -> Packed:
    """Download a remote manifest's auxiliary files to every node, and open it there. Every rank calls this."""
    assert options.stage_to_local is not None, "checked by the launcher"
    check_same_manifest(str(read), read.digest)
    with raise_on_all_ranks("manifest"):
        folder = node_folder(options.stage_to_local, name_of(read.folder.location), read.digest).resolve()
        if world.local_rank == 0:
            fetch(read, folder)
    with raise_on_all_ranks("manifest"):
        return open_packed(read, copied_to=folder)


def check_same_manifest(where: str, digest: str) -> None:
    """Check that the digest of the file that this rank has read is rank 0's. Every rank calls this."""
    expected = from_rank_0(digest)
    with raise_on_all_ranks("manifest"):
        if digest != expected:
            raise ManifestError(
                where,
                "differs from the manifest that rank 0 read",
                "every node must have the same checkpoint: a copy on the node's own disk may be outdated; if the "
                "manifest was replaced in the meantime, start again",
                code="manifest.differs-between-ranks",
            )


class LocalCache:
    """The shards of one manifest that the ranks of this node read, in a folder on its own disk."""

    def __init__(
        self, origin: Bundles, folder: CacheFolder, modules: Container[str], holds: Container[Holds], world: World
    ) -> None:
        self._origin, self._folder, self._world = origin, folder, world
        self._shards = shards_of(origin.manifest, modules, holds)
        self._timer = StallTimer(folder.limit_s)  # of the disks that this rank copies from and to
        self.report: CacheReport | None = None  # of all that this rank has copied

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def bundles(self) -> Bundles:
        """The cached bundles as they are now: a shard that was copied again is another file."""
        return Bundles(self._origin.manifest, self._folder.path)

    def ensure(self, *, verifies: bool = False) -> CacheReport:
        """Cache all shards. Every rank of the job calls this; the ranks of a node split the work.

        With `verifies`, cached shards are read, and copied again if they are damaged. Otherwise, loading finds damage.
        """
        started_s = time.perf_counter()
        with raise_on_all_ranks("stage to local"):
            if self._world.local_rank == 0:
                self._folder.check_room(self._shards)
            wanted = [
                Wanted(path=shard.path, nbytes=shard.nbytes, is_cached=self._folder.has(shard))
                for shard in self._assigned
            ]
        if verifies:
            report = in_rounds("stage to local", self._verify_own, timer=self._timer)
        else:
            transfers = plan_transfers(dict(enumerate(from_all_ranks(wanted))))
            report = in_rounds("stage to local", partial(self._read_own, transfers), timer=self._timer)
            report = self._exchange(transfers, report)
        report = replace(report, copy_s=time.perf_counter() - started_s)
        self._log(report)
        self.report = report if self.report is None else self.report.followed_by(report)
        return report

    def repair(self) -> bool:
        """Copy damaged shards again, and return whether any node had one. Every rank of the job calls this."""
        return not is_true_for_all(self.ensure(verifies=True).num_damaged == 0)

    @property
    def _assigned(self) -> tuple[Shard, ...]:
        """This rank's part of its node's shards."""
        return assign_shards(self._shards, self._world.local_size)[self._world.local_rank]

    def _read_own(self, transfers: Sequence[Transfer], stop: threading.Event) -> CacheReport:
        """Cache what this rank reads from the store: for itself, and for other nodes."""
        received = {transfer.path for transfer in transfers if self._world.rank in transfer.receivers}
        assigned = [shard for shard in self._assigned if shard.path not in received]
        with self._timer.working():
            return self._report([shard for shard in assigned if self._ensure(shard, partial(self._timer.beat, stop))])

    def _exchange(self, transfers: Sequence[Transfer], report: CacheReport) -> CacheReport:
        """Send and receive shards, one at a time on each rank. Every rank calls this, and all raise if one fails."""
        groups = open_groups(transfers, self._world.rank, self._folder.limit_s + _SPARE_S)
        copied = Counter[Origin]()
        for wave in waves_of(transfers):
            transfer = next((transfer for transfer in wave if self._world.rank in transfer.ranks), None)
            copied += in_rounds("stage to local", partial(self._transfer, transfer, groups), timer=self._timer)
        for group in groups.values():
            dist.destroy_process_group(group)
        return replace(
            report,
            nbytes=report.nbytes + copied.total(),
            reused_nbytes=report.reused_nbytes - copied.total(),
            peer_nbytes=copied["node"],
        )

    def _transfer(self, transfer: Transfer | None, groups: Groups, _: threading.Event) -> Counter[Origin]:
        """Take part in a transfer, if there is one for this rank; return the bytes that it copied, by their origin."""
        if transfer is None:
            return Counter()
        shard = next(shard for shard in self._assigned if shard.path == transfer.path)
        with self._timer.working():
            if transfer.sender == self._world.rank:
                send(self._folder.path / shard.path, shard, groups[transfer.ranks], self._timer.beat)
            elif (origin := self._receive(shard, transfer, groups[transfer.ranks])) is not None:
                return Counter({origin: shard.nbytes})
        return Counter()

    def _receive(self, shard: Shard, transfer: Transfer, group: dist.ProcessGroup) -> Origin | None:
        """Cache a shard that another rank sends; return where it came from; None: another process has cached it."""
        beat = self._timer.beat
        file = ReceivedFile(path=shard.path, nbytes=shard.nbytes, sender=transfer.sender, group=group, beat=beat)
        try:
            return "node" if self._folder.ensure(file, shard, beat) else None
        except ShardError as error:  # damaged on the other node's disk, or on the way
            file.finish()
            logger.info("[rank %d] %s; reading it from %s", self._world.rank, error, self._origin.root)
            return "store" if self._ensure(shard, beat) else None
        finally:
            file.finish()

    def _verify_own(self, stop: threading.Event) -> CacheReport:
        """Verify this rank's part, and copy what is missing or damaged."""
        beat = partial(self._timer.beat, stop)
        with self._timer.working():
            missing = [shard for shard in self._assigned if self._ensure(shard, beat)]
            cached = [shard for shard in self._assigned if shard not in missing]
            damaged = [shard for shard in cached if not self._folder.verify(shard, beat)]
            for shard in damaged:
                self._ensure(shard, beat)
        return self._report([*missing, *damaged], num_damaged=len(damaged))

    def _report(self, copied: Sequence[Shard], *, num_damaged: int = 0) -> CacheReport:
        nbytes = sum(shard.nbytes for shard in copied)
        return CacheReport(
            nbytes=nbytes,
            reused_nbytes=sum(shard.nbytes for shard in self._assigned) - nbytes,
            num_damaged=num_damaged,
            copy_s=0.0,
        )

    def _ensure(self, shard: Shard, beat: Callable[[], None]) -> bool:
        return self._folder.ensure(self._origin.root.file(shard.path), shard, beat)

    def _log(self, report: CacheReport) -> None:
        if report.nbytes or report.reused_nbytes:
            logger.info(
                "[rank %d] copied %s to %s in %.2f s%s; %s were already cached%s",
                self._world.rank, show_bytes(report.nbytes), self.path, report.copy_s,
                f", {show_bytes(report.peer_nbytes)} of it from other nodes" if report.peer_nbytes else "",
                show_bytes(report.reused_nbytes),
                f"; {report.num_damaged} damaged shards were copied again" if report.num_damaged else "",
            )  # fmt: skip


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


def waves_of(transfers: Iterable[Transfer]) -> list[list[Transfer]]:
    """Return transfers in waves, in which no rank has two: each is in the first after the earlier ones of its ranks."""
    num_waves, waves = Counter[int](), list[list[Transfer]]()
    for transfer in transfers:
        number = max(num_waves[rank] for rank in transfer.ranks)
        if number == len(waves):
            waves.append([])
        waves[number].append(transfer)
        for rank in transfer.ranks:
            num_waves[rank] = number + 1
    return waves


def open_groups(transfers: Iterable[Transfer], rank: int, timeout_s: float) -> Groups:
    """Open a gloo group for each set of ranks, by the set, and return those of this rank. Every rank calls this.

    With `use_local_synchronization`, torch 2.13 names a group by how many its rank has, which differs between ranks.
    """
    sets = sorted({transfer.ranks for transfer in transfers})
    timeout = timedelta(seconds=timeout_s)
    groups = {ranks: dist.new_group(ranks, timeout=timeout, backend="gloo") for ranks in sets}
    return {ranks: group for ranks, group in groups.items() if rank in ranks}


def send(path: Path, shard: Shard, group: dist.ProcessGroup, beat: Callable[[], None]) -> None:
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
        beat()
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
    beat: Callable[[], None]
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
        self.beat()
        self._received_nbytes += count
        if not buffer[count]:
            self._received_nbytes = self.nbytes
            raise UnreachableError(str(self), "cannot be read on its node", code="store.unreadable")
        self._rounds.append((begin, buffer.numpy().data[:count]))


def _modules_on_node(launched: Manifest, mesh: Mesh, world: World) -> frozenset[str]:
    """Return the modules of all ranks on this node."""
    first, placement = world.rank - world.local_rank, launched.placement
    pipeline_ranks = {rank // mesh.degrees.per_stage for rank in range(first, first + world.local_size)}
    stages = (stage for rank in pipeline_ranks for stage in placement.stages_on(rank))
    return frozenset(module for stage in stages for module in launched.stages[stage].modules)
