"""One of four ranks that load a model with packed matrices, each of them sharded, and save it.

usage: packed_matrices_worker.py MODEL PACKED OUT

Weights are sharded as transformers' packed_colwise and packed_rowwise shard them, and over their other dimension.
Each matrix has an odd number of rows: the last rank has fewer. The model is loaded and saved by the names of files, and
through an adapter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, LlamaForCausalLM

import runner

PLACES = {
    "model.layers.0.mlp.up_proj": (Shard(1), _StridedShard(0, split_factor=2)),
    "model.layers.0.mlp.down_proj": (Shard(0), _StridedShard(-1, split_factor=2)),
}


class Unchanged:
    """An adapter for names and values that are those of files."""

    def to_hf(self, state_dict: dict[str, Any], /) -> dict[str, Any]:
        return state_dict

    def from_hf(self, hf_state_dict: dict[str, Any], /) -> dict[str, Any]:
        return hf_state_dict


def main(model: Path, packed: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    mesh, stored = init_device_mesh("cpu", (2, 2)), load_file(model / "model.safetensors")
    for adapter in (None, Unchanged()):
        with torch.device("meta"):
            module = LlamaForCausalLM(AutoConfig.from_pretrained(model))
        for name, placements in PLACES.items():
            whole = module.get_parameter(f"{name}.weight").detach()
            weight = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            module.get_submodule(name).weight = nn.Parameter(weight)
        runner.load_stages(packed, 0, module, adapter=adapter)
        for name, parameter in module.named_parameters():
            loaded = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(loaded, stored[name]), name
        runner.save_stages(packed, 0, module, out / ("adapted" if adapter else "named"), step=0, adapter=adapter)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
