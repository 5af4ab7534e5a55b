"""A rank of `examples/train.py`, which then writes what its modules and its optimizer have, with torch alone.

It also saves a model that both ranks share in slices, and stages with differing copies of a tied weight: a refusal.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import runner
from manifests.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    sys.path.insert(0, str(ROOT / "examples"))
    from load_stage import load
    from train import train

    dist.init_process_group("gloo")
    rank, packed = dist.get_rank(), folder / "pp2"
    stage, optimizer = train(str(packed), num_steps, str(folder / "history" / f"step-{num_steps:06d}"))
    names = {id(weight): name for name, weight in stage.whole.named_parameters()}
    moments = {names[id(weight)]: state["exp_avg"] for weight, state in optimizer.state.items()}
    torch.save((stage.whole.state_dict(), moments), folder / f"{rank}.pt")

    with torch.no_grad():
        stage.whole.get_parameter("lm_head.weight" if rank else "model.embed_tokens.weight").view(-1)[rank] += 1
    for saved_rank, optimizer_of_rank in ((rank, None), (0, None), (rank, None if rank else optimizer)):
        try:
            runner.save_stages(packed, saved_rank, stage.whole, folder / "no", step=3, optimizer=optimizer_of_rank)
        except UserError as error:
            print("refused", error.code)

    shared, _ = load(str(folder / "pp1"), 0)
    for layer in shared.whole.model.layers:
        fully_shard(layer)
    fully_shard(shared.whole)
    print("sliced", runner.save_stages(folder / "pp1", 0, shared.whole, folder / "sliced", step=0))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
