"""A rank with tie groups of every form, and what it sees of them. Started on 4 ranks.

usage: ties_worker.py MODEL OUT
"""

from __future__ import annotations

import json
import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from manifests.errors import RankError
from manifests.placement import Placement
from manifests.schema import TieGroup, TieMember
from runner.config.schema import OptimOptions
from runner.models import family_for
from runner.pipeline.chunk import build_chunks, named_hf_parameters
from runner.training.gradient_norm import StepTotals
from runner.training.mixed_precision import keep_masters, master_of, round_masters
from runner.training.optimizer import Optimizer
from runner.training.ties import build_ties, check_equal, lead_parameters, sync_gradients
from tests.fast.runner.tiny import CPU, EMBEDDING, HEAD, fill, read_config
from tests.process.runner.pipeline.parity_cases import cut_modules

PLACEMENT = Placement(num_stages=8, num_ranks=4)
SHARES = (2, 1, 1, 1, 1, 1, 1, 3)  # layer i is on stage i, on rank i % 4
QUERY, UP = "model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.mlp.up_proj.weight"


def group(*members: tuple[str, int]) -> TieGroup:
    owner, *replicas = (TieMember(fqn=fqn, stage=stage) for fqn, stage in members)
    return TieGroup(owner=owner, replicas=tuple(replicas))


GROUPS = (
    group(*((QUERY.format(layer), layer) for layer in (4, 0, 1, 6))),  # two on rank 0, three ranks
    group(*((UP.format(layer), layer) for layer in (7, 3))),  # both on rank 3
    group((EMBEDDING, 0), (HEAD, 7)),
)


def main(folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    family = family_for(read_config(folder), max_seq_len=8)
    stage_modules = cut_modules(family.modules, SHARES)
    chunks = build_chunks(family, stage_modules, PLACEMENT.stages_on(dist.get_rank()))
    fill(chunks, folder)
    named = dict(item for chunk in chunks for item in named_hf_parameters(chunk))
    ties = build_ties(GROUPS, chunks, PLACEMENT, timedelta(seconds=60))
    parameters = lead_parameters(chunks, ties)
    found: dict[str, Any] = {
        "ties": {tie.fqn: list(tie.ranks) for tie in ties if tie.group is not None},
        "shared": [tie.fqn for tie in ties if len({p.data_ptr() for p in tie.members}) < len(tie.members)],
        "led": sorted(named.keys() - {fqn for fqn, _ in parameters}),
        # Every weight is random: the copies on different ranks differ.
        "unequal": refusal_of(lambda: check_equal(ties)),
    }
    for parameter in named.values():
        parameter.data.fill_(0.5)
    check_equal(ties)

    for fqn, parameter in named.items():
        if fqn != QUERY.format(6):  # a member without a gradient
            layer = int(fqn.split(".")[2]) if ".layers." in fqn else 10
            parameter.grad = torch.full_like(parameter, layer + 1)
    sync_gradients(ties)
    found["sums"] = {tie.fqn: set_of(tie.leader.grad) for tie in ties}
    found["followers"] = [fqn for fqn in found["led"] if named[fqn].grad is not None]
    totals = StepTotals(parameters, ties, device=CPU)
    found["totals"] = [totals.reduce(2.5 if dist.get_rank() == 3 else None, 7).norm]

    Optimizer(parameters, OptimOptions(lr=0.1)).step(0)
    check_equal(ties)
    found["stepped"] = {tie.fqn: [set_of(member) for member in tie.members] for tie in ties}

    if dist.get_rank() == 2:
        named[UP.format(2)].grad = torch.full_like(named[UP.format(2)], math.inf)
    found["not_finite"] = refusal_of(lambda: totals.reduce(None, 0))

    for parameter in named.values():
        parameter.grad = None
    keep_masters(chunks, torch.float64)  # finer than the weights, which they round to
    for parameter in named.values():
        master_of(parameter).fill_(0.5 + dist.get_rank() * 2**-40)
    round_masters(named.values())
    found["weights"] = [set_of(tie.leader) for tie in ties]
    found["unequal_masters"] = refusal_of(lambda: check_equal(ties))
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def refusal_of(act: Any) -> dict[str, str]:
    try:
        act()
    except RankError as error:
        return {"code": error.code, "where": error.where, "problem": error.problem}
    return {}


def set_of(tensor: torch.Tensor | None) -> list[float]:
    assert tensor is not None
    values: list[float] = torch.unique(tensor).tolist()
    return values


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
