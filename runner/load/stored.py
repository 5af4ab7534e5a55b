"""Loading a checkpoint on the ranks of a job: from the cache or not, in rows or by broadcast."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from manifests.errors import InputError
from manifests.index import split_by_size
from manifests.safetensors import nbytes_of
from manifests.schema import Holds
from runner.bundle.packed import Packed
from runner.distributed.fail_together import from_all_ranks, raise_on_all_ranks
from runner.distributed.rounds import in_rounds, result_of
from runner.load.deferred import DeferredVerification
from runner.load.load import (
    LoadReport,
    Read,
    Reading,
    count_unverified,
    plan_reads,
    read_all,
    read_planned,
    verify_planned,
)
from runner.load.local_cache import LocalCache
from runner.load.verify_parts import PartRead, ToVerify, choose_readers, share_parts
from runner.tensors.local_shard import STORED_DTYPES, Piece
from stores.bundles import Bundles

PendingRead = Future[tuple[LoadReport, list[PartRead]]] | list[Read]  # begun, or planned only


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageLoader:
    """A checkpoint's bundles, or this node's cache of them, and how the ranks of a stage load them."""

    origin: Packed
    cache: LocalCache | None
    group: dist.ProcessGroup | None  # the ranks of this stage, if there are several
    is_broadcast: bool  # each tensor is read once for the group; otherwise each rank reads its part
    device: torch.device
    how: Reading
    deferred: DeferredVerification  # of what is not hashed as it is read

    @contextmanager
    def reading(self, pieces: Sequence[Piece]) -> Iterator[PendingRead | None]:
        """Read this rank's weights while a block runs, and after it; None: files are remote or to be cached.

        What headers tell, such as a missing shard, is raised at once on all ranks, and what fails later by `load`. A
        block that raises ends the reading.
        """
        # The block may close connections that are opened meanwhile, see Note [Smaller world].
        if self.cache or self.origin.store is not None or self.origin.manifest.virtual is not None:
            yield None
            return
        with raise_on_all_ranks("load"):
            reads = plan_reads(pieces, self._bundles, self.origin.shape)
        if self.is_broadcast and self.group is not None:
            yield reads
            return
        stop, pool = threading.Event(), ThreadPoolExecutor(1, "weights")
        how = replace(self.how, stop=stop)
        pending = pool.submit(read_planned, reads, how)
        pool.shutdown(wait=False)
        try:
            yield pending
        except BaseException:
            stop.set()
            raise

    def load(self, pieces: Sequence[Piece], holds: Holds, pending: PendingRead | None = None) -> LoadReport:
        """Load this rank's weights, or one kind of its optimizer state; every rank of the job calls this.

        Everything is verified, now or by `deferred`, except original files, which have no digests. If cached shards of
        any node are found damaged now, they are copied again, once.
        """
        try:
            return self._load_once(pieces, holds, pending)
        except InputError as error:
            # A disk that did not answer for --timeout is not asked again, for as long.
            if self.cache is None or error.code == "store.stalled" or not self.cache.repair():
                raise
        return self._load_once(pieces, holds)

    def _load_once(self, pieces: Sequence[Piece], holds: Holds, pending: PendingRead | None = None) -> LoadReport:
        with raise_on_all_ranks("load"):
            reads = plan_reads(pieces, self._bundles, self.origin.shape, holds) if pending is None else pending
        if not self.is_broadcast or self.group is None:
            report, parts = in_rounds("load", partial(self._read, reads), timer=self.how.timer)
            shared = share_parts(parts, self.group)
            if not self.how.hashes:
                self.deferred.add(shared)
                return report
            started_s = time.perf_counter()
            verify = partial(self._verify, shared)
            verified_nbytes = in_rounds("load", verify, timer=self.how.timer)
            load_s = report.load_s + time.perf_counter() - started_s
            return replace(report, verified_nbytes=verified_nbytes, load_s=load_s)
        assert isinstance(reads, list)
        with raise_on_all_ranks("load"):  # the ranks of a stage fail as one, and then the others
            report, unverified = read_for_all(reads, self.group, self.device, self.how)
        self.deferred.add(share_parts(unverified))
        return report

    def _read(self, reads: PendingRead, stop: threading.Event) -> tuple[LoadReport, list[PartRead]]:
        if isinstance(reads, Future):
            return result_of(reads, stop)
        return read_planned(reads, replace(self.how, stop=stop))

    def _verify(self, tensors: Sequence[ToVerify], stop: threading.Event) -> int:
        return verify_planned(tensors, replace(self.how, stop=stop))

    @property
    def _bundles(self) -> Bundles:
        return self.cache.bundles if self.cache else self.origin.bundles


_ROUND_NBYTES = 64 << 20  # read before a broadcast
_Key = tuple[str, int]  # a file, and the offset of a tensor in it


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shared:
    """A stored tensor that ranks of a group need, and the rank that reads it."""

    key: _Key
    dtype: str
    shape: tuple[int, ...]
    reader: int

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


def read_for_all(
    reads: Sequence[Read], group: dist.ProcessGroup, device: torch.device, how: Reading
) -> tuple[LoadReport, list[PartRead]]:
    """Execute the planned reads of every rank of a group; each of them calls this.

    The rank that reads a tensor verifies its digest, or returns it to be verified if nothing is hashed. This needs
    extra memory for two rounds of tensors.
    """
    started_s, nbytes = time.perf_counter(), 0
    wanted = defaultdict[_Key, list[Read]](list)
    for read in reads:
        wanted[str(read.at.file), read.at.begin].append(read)
    rank, shared, unverified = dist.get_rank(group), _share(wanted, group), list[PartRead]()
    for some in split_by_size(shared, lambda tensor: tensor.nbytes, _ROUND_NBYTES):
        with raise_on_all_ranks("load", group):
            buffers = {tensor.key: torch.empty(tensor.shape, dtype=STORED_DTYPES[tensor.dtype]) for tensor in some}
            own_reads = [
                _read_whole(wanted[tensor.key][0], buffers[tensor.key]) for tensor in some if tensor.reader == rank
            ]
            unverified += read_all(own_reads, how)
            buffers = {key: buffer.to(device) for key, buffer in buffers.items()}
        nbytes += sum(read.nbytes for read in own_reads)
        for tensor in some:
            sent = buffers.pop(tensor.key)
            dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=tensor.reader)
            for read in wanted.get(tensor.key, ()):
                read.into.memory.copy_(sent[read.region.index])
    report = LoadReport(
        num_tensors=len({read.at.name for read in reads}),
        num_parts=0,
        nbytes=nbytes,
        load_s=time.perf_counter() - started_s,
        num_unverified=count_unverified(reads),
    )
    return report, unverified


def _share(wanted: dict[_Key, list[Read]], group: dist.ProcessGroup) -> list[_Shared]:
    """Assign the tensors that ranks of a group need to readers, in the order of files and offsets."""
    needed = from_all_ranks({key: (read.at.dtype, read.at.shape) for key, (read, *_) in wanted.items()}, group)
    tensors = {key: tensor for of_rank in needed for key, tensor in of_rank.items()}
    readers = choose_readers([{key: nbytes_of(*tensor) for key, tensor in of_rank.items()} for of_rank in needed])
    return [
        _Shared(key=key, dtype=dtype, shape=shape, reader=readers[key])
        for key, (dtype, shape) in sorted(tensors.items())
    ]


def _read_whole(read: Read, buffer: torch.Tensor) -> Read:
    """Return a read of the whole stored tensor of which `read` is a part."""
    at = read.at
    return Read(into=Piece(fqn=at.name, shape=at.whole_shape, offset=at.offset, memory=buffer), at=at)
