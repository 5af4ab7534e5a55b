"""One of several ranks that save a model as torchtitan does: every tensor in shards along an axis of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    state = torch.load(folder / "native.pt")
    placements = (Shard(0), Shard(1), Replicate())
    sharded = {
        name: distribute_tensor(tensor, mesh, [placements[number % 3 if tensor.dim() > 1 else 0]])
        for number, (name, tensor) in enumerate(state.items())
    }
    dcp.save(sharded, checkpoint_id=folder / "step-7")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
