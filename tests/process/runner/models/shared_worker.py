"""A rank that compares tiny models, whose parameters it shares with others, with the whole of each.

usage: shared_worker.py CASES OUT

CASES is a JSON list of `tools.shared_parity.Case`, by architecture. OUT gets, from rank 0, a JSON list: on each rank,
what differs most in logits, loss and gradients of every case, or the error.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from manifests.models.trainable import generic_entry
from runner.distributed.world import World, join_world
from tools.shared_parity import compare_all


def main(cases: Path, out: Path) -> None:
    warnings.simplefilter("ignore")
    world = World.from_environment(os.environ)
    join_world(torch.device("cpu"), timeout_s=60)
    asked = [(generic_entry(name), dim, changes) for name, dim, changes in json.loads(cases.read_text())]
    found = [each if isinstance(each, str) else astuple(each) for each in compare_all(asked, world.rank)]
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, found)
    if world.rank == 0:
        out.write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
