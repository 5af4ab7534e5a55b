"""One of two ranks that save checkpoints one after the other, with no model: every number in one is its step.

usage: save_worker.py PACKED HISTORY LAST [FULL]

Goes on after the newest checkpoint until step LAST. In step FULL, rank 1's disk is full. With SLOW_S, that disk takes
so many seconds to bring a file to it; with PRUNING_S, rank 0's takes so long to remove a folder. Ranks wait for
TIMEOUT_S for each other's saves. Rank 0 prints a line for each save: `saved N` or `failed N CODE at PLACE`.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from manifests.models import module_of
from manifests.schema import MOMENTS, WEIGHTS, DataPosition, Holds
from runner.bundle.packed import Packed, open_packed
from runner.checkpoint.async_save import Saver, SaveReport
from runner.checkpoint.history import claim_history, find_checkpoints, step_of
from runner.checkpoint.resume import remember
from runner.checkpoint.save import SaveContext
from runner.checkpoint.state import Held
from runner.config.flags import parse_training
from runner.tensors.local_shard import whole_pieces

TIMEOUT = timedelta(seconds=60)
SAVE_TIMEOUT = timedelta(seconds=float(os.environ.get("TIMEOUT_S", 60)))


def held_by(rank: int, packed: Packed) -> Held:
    modules = packed.stage_modules[rank]
    shapes = {fqn: shape for fqn, shape in packed.shape.tensors.items() if module_of(fqn, modules)}
    kinds: tuple[Holds, ...] = (WEIGHTS, *MOMENTS)
    return {rank: {holds: whole_pieces({fqn: torch.zeros(shape) for fqn, shape in shapes.items()}) for holds in kinds}}


def tell(reports: tuple[SaveReport, ...], rank: int) -> None:
    for report in reports if rank == 0 else ():
        failure = report.failure
        ended = f"failed {report.step} {failure.code} at {failure.where}" if failure else f"saved {report.step}"
        print(ended, flush=True)


def slow_down(seconds: float) -> None:
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow_fsync  # type: ignore[assignment]


def slow_down_removals(seconds: float) -> None:
    remove = shutil.rmtree

    def slow_rmtree(path: str | Path) -> None:
        time.sleep(seconds)
        remove(path)

    shutil.rmtree = slow_rmtree  # type: ignore[assignment]


def main(folder: Path, history: Path, last: int, full: int) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, packed = dist.get_rank(), open_packed(folder)
    options = parse_training(["--data", "synthetic", "--checkpoint", str(history), "--keep", "2"])
    held = held_by(rank, packed)
    if rank == 1 and "SLOW_S" in os.environ:
        slow_down(float(os.environ["SLOW_S"]))
    if rank == 0 and "PRUNING_S" in os.environ:
        slow_down_removals(float(os.environ["PRUNING_S"]))
    first = (step_of(found[0]) or 0) + 1 if (found := find_checkpoints(history)) else 1
    dist.barrier()
    with ExitStack() as stack:
        check = stack.enter_context(claim_history(history)) if rank == 0 else lambda: None
        context = SaveContext(manifest=packed.manifest, root=packed.root, parents=(packed.read.parent,))
        assert options.checkpoint is not None
        saver = stack.enter_context(Saver(context, options.checkpoint, held, SAVE_TIMEOUT, check=check))
        for step in range(first, last + 1):
            for piece in (piece for kinds in held.values() for pieces in kinds.values() for piece in pieces):
                piece.memory.fill_(step)
            data = DataPosition(num_sequences=step, digest="blake3:" + 64 * "0")
            if rank == 1:
                tell(saver.reports(wait=True), rank)  # the limit is the process's: not before the last save has ended
                limit = 1 << 16 if step == full else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            saver.save(held, remember(options, packed.shape, step=step, num_tokens=step, data=data))
            tell(saver.reports(), rank)
        tell(saver.reports(wait=True), rank)
    dist.barrier()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if sys.argv[4:] else 0)
    except Exception as error:
        print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
