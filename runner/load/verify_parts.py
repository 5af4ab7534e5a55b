"""Verifying stored tensors that ranks read in part: one rank of a group reads each whole, and checks all parts.

# Note [Parts are verified]
A digest covers all bytes of a stored tensor, so a rank that reads a part cannot compare it. Each rank hashes the bytes
that it read, and exchanges region and digest with its group. Every tensor is then read whole by one of these ranks: it
must match the digest in its header, and its regions the digests of the other ranks. So exactly the bytes in each rank's
memory are verified, whichever disk, cache or network they came through (docs/adr/0020). The work is balanced by bytes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch.distributed as dist

from manifests.digest import PREFIX, Hasher
from manifests.errors import ShardError
from manifests.index import share_evenly
from manifests.slices import Slice
from runner.bundle.verified_read import check_digest
from runner.distributed.fail_together import from_all_ranks
from runner.load.fill import BLOCK_NBYTES, ranges_of
from runner.tensors.local_shard import STORED_DTYPES
from stores.bundles import TensorAt
from stores.workers import for_each

_Key = tuple[str, int]  # a file, and the offset of a stored tensor in it
_Digests = dict[_Key, tuple[int, dict[Slice, str]]]  # its size in bytes, and the digest of each part


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRead:
    """A region of a stored tensor, and the hex digest of the bytes read for it; None: they were not hashed."""

    at: TensorAt
    region: Slice
    digest: str | None

    @property
    def key(self) -> _Key:
        return str(self.at.file), self.at.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class ToVerify:
    """A stored tensor for this rank to read whole, and the ranks' digests of its parts."""

    at: TensorAt
    parts: tuple[Mapping[Slice, str], ...]


def share_parts(parts: Sequence[PartRead], group: dist.ProcessGroup | None = None) -> list[ToVerify]:
    """Distribute the tensors that ranks of a group read, and return those for this rank to verify.

    Every rank of the group calls this; without a group, a rank verifies its own parts. The original files of virtual
    bundles have no digests: their parts are skipped.
    """
    tensors: dict[_Key, TensorAt] = {part.key: part.at for part in parts if part.at.blake3 is not None}
    mine: _Digests = {key: (at.nbytes, {}) for key, at in tensors.items()}
    for part in parts:
        if part.key in mine and part.digest is not None:
            mine[part.key][1][part.region] = part.digest
    everyone, rank = [mine], 0
    if group is not None:
        everyone, rank = from_all_ranks(mine, group), dist.get_rank(group)
    sizes = [{key: nbytes for key, (nbytes, _) in digests.items()} for digests in everyone]
    return [
        ToVerify(at=tensors[key], parts=tuple(digests[key][1] for digests in everyone if key in digests))
        for key, reader in choose_readers(sizes).items()
        if reader == rank
    ]


def verify_parts(tensors: Sequence[ToVerify], num_threads: int = 2, beat: Callable[[], None] = lambda: None) -> int:
    """Read tensors whole, and return the bytes read; `beat` is called after each block, and may raise."""

    def verify(tensor: ToVerify, stop: threading.Event) -> None:
        for _ in verify_whole(tensor):
            beat()

    for_each(tensors, verify, num_threads)
    return sum(tensor.at.nbytes for tensor in tensors)


def choose_readers(sizes: Sequence[Mapping[_Key, int]]) -> dict[_Key, int]:
    """Choose, identically on all ranks, which of the ranks that need a tensor reads it; `sizes` has those of each rank.

    Units: sizes in bytes.
    """
    ranks, nbytes = defaultdict[_Key, list[int]](list), dict[_Key, int]()
    for rank, of_rank in enumerate(sizes):
        nbytes |= of_rank
        for key in of_rank:
            ranks[key].append(rank)
    return share_evenly(sorted(nbytes.items()), len(sizes), ranks)


def verify_whole(tensor: ToVerify) -> Iterator[None]:
    """Read a tensor whole, block by block; raises as `verify_parts`."""
    at, regions = tensor.at, {region for parts in tensor.parts for region in parts}
    itemsize = STORED_DTYPES[at.dtype].itemsize
    whole, hashers = Hasher(), {region: _RangeHasher(ranges_of(at.shape, region, itemsize)) for region in regions}
    block = memoryview(bytearray(min(BLOCK_NBYTES, at.nbytes)))
    with closing(at.file.open(((at.begin, at.end),))) as reader:
        for position in range(0, at.nbytes, BLOCK_NBYTES):
            piece = block[: min(BLOCK_NBYTES, at.nbytes - position)]
            reader.read_into(piece, at.begin + position)
            whole.update(piece)
            for hasher in hashers.values():
                hasher.update(piece, position)
            yield
    check_digest(at, whole.hexdigest())
    for parts in tensor.parts:
        for region, digest in parts.items():
            if (expected := hashers[region].hexdigest()) != digest:
                begin, end = list(region.offset), list(region.end)
                raise ShardError(
                    at.place,
                    f"{begin} to {end}: expected {PREFIX}{expected} (read whole), "
                    f"found {PREFIX}{digest} (read in part)",
                    "two reads of the same bytes differ: check this node's disk, page cache and network",
                    code="shard.readings-differ",
                )


class _RangeHasher:
    """Hashes the bytes of ascending ranges while all bytes are read from front to back."""

    def __init__(self, ranges: Iterator[tuple[int, int]]) -> None:
        self._ranges, self._hasher = ranges, Hasher()
        self._next = next(ranges, None)

    def update(self, block: memoryview, position: int) -> None:
        """Hash what the ranges contain of the bytes at `position`, which follow those of the last call."""
        end = position + len(block)
        while self._next is not None and self._next[0] < end:
            first, last = self._next
            self._hasher.update(block[max(first, position) - position : min(last, end) - position])
            if last > end:
                return
            self._next = next(self._ranges, None)

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()
