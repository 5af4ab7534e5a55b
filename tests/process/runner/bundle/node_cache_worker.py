"""Ranks that each are a node of their own, with a cache of the same bundles.

usage: node_cache_worker.py PACKED PLACE CASE

Writes `PLACE/CASE-RANK.json`: what was copied, or the code of the error.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import distributed as dist

from manifests.errors import UserError
from manifests.schema import WEIGHTS
from runner.bundle.cache_folder import CacheFolder
from runner.bundle.packed import open_packed
from runner.distributed.world import World, join_world
from runner.load import local_cache
from runner.load.local_cache import LocalCache


def main(packed: Path, place: Path, case: str) -> None:
    world = World.from_environment(os.environ)
    join_world(torch.device("cpu"), timeout_s=30)
    opened = open_packed(packed)
    modules = {module for stage in opened.manifest.stages for module in stage.modules}
    folder = CacheFolder(path=place / case / f"node{world.rank}", limit_s=3 if case in ("busy", "hangs") else 30)
    if case == "lost" and world.rank == 0:  # after the exchange of what each has, before the first round
        send = local_cache.send
        local_cache.send = lambda path, *rest: send(path.with_name("absent"), *rest)
    if case == "hangs" and world.rank == 0:
        local_cache._read_round = lambda *of_round: threading.Event().wait()
    if case == "busy":  # the last rank needs the last shard alone, and waits for those that send each other the first
        modules = set(opened.manifest.stages[-1].modules) if world.rank == world.size - 1 else modules
        read, local_cache._ROUND_NBYTES = local_cache._read_round, next(opened.manifest.shards).nbytes // 8 + 1
        local_cache._read_round = lambda *of_round: time.sleep(0.5) or read(*of_round)
    node = replace(world, local_rank=0, local_size=1)
    try:
        told = asdict(LocalCache(opened.bundles, folder, modules, (WEIGHTS,), node).ensure())
    except UserError as error:
        told = {"code": error.code, "text": str(error)}
    (place / f"{case}-{world.rank}.json").write_text(json.dumps(told))
    if case == "hangs":
        os._exit(0)  # threads wait
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
