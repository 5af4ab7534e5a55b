"""The local cache of bundles (`--stage-to-local`): a node's ranks copy what they read to its own disk first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from manifests.errors import ManifestError
from manifests.schema import MOMENTS, WEIGHTS, Holds, Manifest, Shard
from manifests.store import parent_of
from runner.bundle.cache_folder import CacheFolder, assign_shards, check_cacheable, node_folder, shards_of
from runner.bundle.packed import Packed, open_packed
from runner.bundle.remote import fetch, name_of
from runner.config.flags import TrainOptions
from runner.distributed.fail_together import from_rank_0, together
from runner.distributed.rounds import in_rounds, is_true_for_all
from runner.distributed.world import World
from runner.parallel.mesh import Mesh
from stores.bundles import Bundles
from stores.manifest_file import ManifestFile

__all__ = ["CacheReport", "LocalCache", "fetch_to_cache", "local_cache_of"]

logger = logging.getLogger("runner")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheReport:
    """What one rank copied to its node's disk, in `copy_s` seconds, and what of its part was already cached."""

    nbytes: int
    reused_nbytes: int
    num_damaged: int  # cached shards that were damaged, and copied again
    copy_s: float


def local_cache_of(
    launched: Packed, origin: Packed, options: TrainOptions, mesh: Mesh, world: World, *, has_moments: bool
) -> LocalCache | None:
    """Return this node's cache of a checkpoint; None without --stage-to-local.

    Raises:
        InputError: the bundles are virtual, or DIR has a variable that is not set on this node.
    """
    if options.stage_to_local is None:
        return None
    check_cacheable(origin.manifest, origin.where)
    digest = parent_of(origin.root).digest
    path = node_folder(options.stage_to_local, name_of(origin.location), digest)
    modules = _modules_on_node(launched.manifest, mesh, world)
    holds = (WEIGHTS, *MOMENTS) if has_moments else (WEIGHTS,)
    return LocalCache(origin.bundles, CacheFolder(path=path, limit_s=options.timeout_s), modules, holds, world)


def fetch_to_cache(file: ManifestFile, manifest: Manifest, digest: str, options: TrainOptions, world: World) -> Packed:
    """Download a remote manifest's auxiliary files to every node, and open it there. Every rank calls this.

    `manifest` and `digest` are what this rank read of `file`.

    Raises:
        UserError: on all ranks, whichever failed.
    """
    assert options.stage_to_local is not None, "checked by the launcher"
    expected = from_rank_0(digest)
    with together("manifest"):
        if digest != expected:
            raise ManifestError(
                str(file),
                "differs from what rank 0 read",
                "it was replaced in the meantime: start again",
                code="manifest.replaced",
            )
        folder = node_folder(options.stage_to_local, name_of(file.folder.location), digest).resolve()
        if world.local_rank == 0:
            fetch(file, folder, (manifest, digest))
    with together("manifest"):
        return replace(open_packed(folder, manifest), store=file.folder)


def _modules_on_node(launched: Manifest, mesh: Mesh, world: World) -> frozenset[str]:
    """Return the modules of all ranks on this node."""
    first, placement = world.rank - world.local_rank, launched.placement
    pipeline_ranks = {rank // mesh.degrees.per_stage for rank in range(first, first + world.local_size)}
    stages = (stage for rank in pipeline_ranks for stage in placement.stages_on(rank))
    return frozenset(module for stage in stages for module in launched.stages[stage].modules)


class LocalCache:
    """The shards of one manifest that the ranks of this node read, in a folder on its own disk."""

    def __init__(
        self, origin: Bundles, folder: CacheFolder, modules: Container[str], holds: Container[Holds], world: World
    ) -> None:
        self._origin, self._folder, self._world = origin, folder, world
        self._shards = shards_of(origin.manifest, modules, holds)

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

        Raises:
            UserError: on all ranks, whichever failed.
        """
        started_s = time.perf_counter()
        with together("stage to local"):
            if self._world.local_rank == 0:
                self._folder.check_room(self._shards)
        nbytes, reused_nbytes, num_damaged = in_rounds("stage to local", partial(self._ensure_own, verifies))
        report = CacheReport(
            nbytes=nbytes,
            reused_nbytes=reused_nbytes,
            num_damaged=num_damaged,
            copy_s=time.perf_counter() - started_s,
        )
        self._say(report)
        return report

    def repair(self) -> bool:
        """Copy damaged shards again, and return whether any node had one. Every rank of the job calls this."""
        return not is_true_for_all(self.ensure(verifies=True).num_damaged == 0)

    def _ensure_own(self, verifies: bool, stop: threading.Event) -> tuple[int, int, int]:
        """Cache this rank's part; return the bytes copied, the bytes already cached, and the damaged shards."""
        nbytes, reused_nbytes, num_damaged = 0, 0, 0
        for shard in assign_shards(self._shards, self._world.local_size)[self._world.local_rank]:
            if self._ensure(shard, stop):
                nbytes += shard.nbytes
            elif verifies and not self._folder.verify(shard, stop):
                num_damaged += 1
                nbytes += shard.nbytes
                self._ensure(shard, stop)
            else:
                reused_nbytes += shard.nbytes
        return nbytes, reused_nbytes, num_damaged

    def _ensure(self, shard: Shard, stop: threading.Event) -> bool:
        return self._folder.ensure(self._origin.root.file(shard.path), shard, stop)

    def _say(self, report: CacheReport) -> None:
        if report.nbytes or report.reused_nbytes:
            logger.info(
                "[rank %d] copied %.2f GiB to %s in %.2f s; %.2f GiB were already cached%s",
                self._world.rank, report.nbytes / 2**30, self.path, report.copy_s, report.reused_nbytes / 2**30,
                f"; {report.num_damaged} damaged shards were copied again" if report.num_damaged else "",
            )  # fmt: skip
