"""One of two ranks that load the weights of their stages: `loading_worker.py PACKED`.

Rank 1's disk takes SLOW_S for each read. Ranks wait for TIMEOUT_S for each other. Each prints `loaded`, or the code of
the error and where it was found.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from manifests.errors import UserError
from manifests.models import module_of
from manifests.schema import WEIGHTS
from runner.bundle.packed import open_packed
from runner.distributed.watchdog import StallTimer
from runner.load.deferred import DeferredVerification
from runner.load.load import Reading
from runner.load.stored import StageLoader
from runner.tensors.local_shard import whole_pieces


def slow_down(seconds: float) -> None:
    preadv = os.preadv

    def slow_preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(seconds)
        return preadv(descriptor, buffers, offset)

    os.preadv = slow_preadv  # type: ignore[assignment]


def main(folder: Path) -> None:
    timeout_s = float(os.environ["TIMEOUT_S"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank, packed = dist.get_rank(), open_packed(folder)
    modules = packed.stage_modules[rank]
    shapes = {fqn: shape for fqn, shape in packed.shape.tensors.items() if module_of(fqn, modules)}
    pieces = whole_pieces({fqn: torch.zeros(shape) for fqn, shape in shapes.items()})
    loader = StageLoader(
        origin=packed, cache=None, group=None, is_broadcast=False, device=torch.device("cpu"),
        how=Reading(timer=StallTimer(timeout_s)), deferred=DeferredVerification(is_needed=False),
    )  # fmt: skip
    if rank == 1:
        slow_down(float(os.environ["SLOW_S"]))
    try:
        with loader.reading(pieces) as pending:
            loader.load(pieces, WEIGHTS, pending)
        print("loaded", flush=True)
    except UserError as error:
        print(f"{error.code} at {error.where}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # a thread may still read
