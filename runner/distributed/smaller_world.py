"""A world of some of a job's ranks, on gloo, while a block runs: what the run builds of all ranks can be tried on few.

# Note [Smaller world]
Code that builds a pipeline makes process groups, asks for its rank and meets all others. In a smaller world it does the
same, on the ranks that are in it, numbered from 0. It runs on a thread of its own: torch caches there what it knows of
device meshes. gloo's `abort` closes no connection, and groups whose stage failed in its backward may never be freed:
FSDP refers to them from the graph. So a rank that fails shuts down the sockets that were opened for its world, and the
others, which wait for it, fail at once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from manifests.errors import RankError, UserError
from runner.distributed.fail_together import causes, from_all_ranks
from runner.distributed.world import same_gpu

T = TypeVar("T")
_CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What a rank raised, without its frames, which would keep process groups alive."""

    error: UserError | None
    problem: str
    place: str  # the last line of the traceback
    is_consequence: bool = False  # of another rank's

    @property
    def refusal(self) -> UserError | None:
        """The user's error that it is; None: it is another, or numbers are not finite."""
        return None if isinstance(self.error, RankError) else self.error


def run_in_world_of(
    ranks: Sequence[int], timeout: timedelta, work: Callable[[int], T], *, usual: timedelta
) -> T | Failure | None:
    """Run `work` of this rank's number in a world of these ranks, which has their order; every rank calls this.

    `timeout` is that of each wait in it, and `usual` that of the job's own world.

    Returns its result or why it failed; None on ranks that are not in that world, which wait for those that are.
    """
    world, before, sockets = c10d._get_default_group(), {*c10d._world.pg_map}, _open_sockets()
    group = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
    outcome: T | Failure | None = None
    if dist.get_rank() in ranks:
        c10d._update_default_pg(group)
        try:
            with ThreadPoolExecutor(1, initializer=same_gpu()) as thread:  # torch's optimizers ask CUDA on CPUs, too
                outcome = thread.submit(_try, work, dist.get_rank()).result()
        finally:
            c10d._update_default_pg(world)
    del group
    if isinstance(outcome, Failure):
        for descriptor, _ in _open_sockets() - sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # not one that listens
                connection.shutdown(socket.SHUT_RDWR)
        _destroy_all_but(before)
    c10d._set_pg_timeout(2 * timeout, world)  # ranks may wait here for all that the others do
    # Groups are named by their number, which must be the same on all ranks.
    c10d._world.group_count = max(from_all_ranks(c10d._world.group_count))
    c10d._set_pg_timeout(usual, world)
    _destroy_all_but(before)
    return outcome


def _open_sockets() -> set[tuple[int, int]]:
    """Return the sockets of this process: descriptors, which are used again, with their inodes."""
    sockets = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.add((int(name), status.st_ino))
    return sockets


def _try(work: Callable[[int], T], rank: int) -> T | Failure:
    try:
        return work(rank)
    except Exception as error:
        *_, first = causes(error)  # torch wraps the errors of stages
        place = traceback.extract_tb(first.__traceback__)[-1]
        user_error = error if isinstance(error, UserError) else None
        return Failure(
            error=user_error.changed() if user_error else None,
            problem=f"{type(first).__name__}: {' '.join(str(first).split())[:300]}",
            place=f"{Path(place.filename).name}:{place.lineno}",
            is_consequence=any(words in str(first) for words in _CLOSED),
        )


def _destroy_all_but(before: set[dist.ProcessGroup]) -> None:
    for group in [group for group in c10d._world.pg_map if group not in before]:
        dist.destroy_process_group(group)
    if "torch.distributed.tensor" in sys.modules:
        _forget_meshes()
    gc.collect()  # closes connections: device meshes and their groups refer to each other


def _forget_meshes() -> None:
    """Empty the caches of torch that outlive a thread, and refer to meshes, and so to their groups."""
    from torch.distributed.tensor import DTensor, _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo

    _redistribute.clear_redistribute_planner_cache()
    propagator = DTensor._op_dispatcher.sharding_propagator
    for cached in (
        _redistribute._gen_transform_infos, MeshTopoInfo.build_from_mesh, propagator._propagate_tensor_meta_cached,
    ):  # fmt: skip
        cached.cache_clear()
