"""Loading a checkpoint on the ranks of a job: from the cache or not, in rows or by broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from manifests.errors import InputError
from manifests.schema import Holds
from runner.bundle.packed import Packed
from runner.distributed.fail_together import together
from runner.load.broadcast import read_for_all
from runner.load.deferred import DeferredVerification
from runner.load.load import LoadReport, Reading, plan_reads, read_tensors
from runner.load.local_cache import LocalCache
from runner.load.verify_parts import share_parts, verify_parts
from runner.tensors.local_shard import Piece
from stores.bundles import Bundles


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

    def load(self, pieces: Sequence[Piece], holds: Holds) -> LoadReport:
        """Load this rank's weights, or one kind of its optimizer state; every rank of the job calls this.

        Everything is verified, now or by `deferred`, except original files, which have no digests. If cached shards of
        any node are found damaged now, they are copied again, once.

        Raises:
            UserError: on all ranks, whichever failed.
        """
        try:
            return self._load_once(pieces, holds)
        except InputError:
            if self.cache is None or not self.cache.repair():
                raise
        return self._load_once(pieces, holds)

    def _load_once(self, pieces: Sequence[Piece], holds: Holds) -> LoadReport:
        bundles, shape = self._bundles, self.origin.shape
        if not self.is_broadcast or self.group is None:
            with together("load"):
                report, parts = read_tensors(pieces, bundles, shape, holds, self.how)
            shared = share_parts(parts, self.group)
            if not self.how.hashes:
                self.deferred.add(shared)
                return report
            with together("load"):
                return replace(report, verified_nbytes=verify_parts(shared, self.how.num_threads))
        with together("load"):
            reads = plan_reads(pieces, bundles, shape, holds)
        with together("load"):  # the ranks of a stage fail as one, and then the others
            report, unverified = read_for_all(reads, self.group, self.device, self.how)
        self.deferred.add(share_parts(unverified))
        return report

    @property
    def _bundles(self) -> Bundles:
        return self.cache.bundles if self.cache else self.origin.bundles
