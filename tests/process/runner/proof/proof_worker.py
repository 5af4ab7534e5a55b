"""A rank that proves combinations, some of them with a mistake planted in the code that the run is made of.

usage: proof_worker.py CASES OUT

CASES is a JSON list of cases. OUT gets for each what differs most, the problem, and the code and place of an error.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from manifests.errors import UserError
from runner.distributed.world import World, join_world
from runner.proof.proving import compare, prove
from tests.fast.runner.proof.combinations import combination
from tests.process.runner.proof.plants import plant


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    flags = case["flags"].split()
    run = combination(case["architecture"], case["pp"], *flags, schedule=case["schedule"], vpp=case["vpp"],
                      **case["changes"])  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if case["plant"]:
            plant(case["plant"], patch)
        if not case["names"]:
            distances, problem = compare(run)
            return {"largest": distances.largest if distances else {}, "problem": problem}
        try:
            prove(run)
        except UserError as error:
            return {"code": error.code, "where": error.where.split(": ")[-1]}
    return {"code": ""}


def main(cases: Path, out: Path) -> None:
    warnings.simplefilter("ignore")
    world = World.from_environment(os.environ)
    join_world(torch.device("cpu"), timeout_s=300)
    results = [run_case(case) for case in json.loads(cases.read_text())]
    if world.rank == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
