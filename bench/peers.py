"""What people use today instead of `reshard pack` and the runner's loader, timed for comparison.

python bench/peers.py script|transformers|mergekit|dcp|dcp-save|dcp-shards|dcp-again SOURCE OUT
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

NUM_STAGES = 4


def script(source: Path, out: Path) -> None:
    """The usual script: open every shard, collect each stage's tensors, save them."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    num_layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    out.mkdir()
    for stage in range(NUM_STAGES):
        tensors = {}
        for shard in sorted(set(weight_map.values())):
            with safe_open(source / shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if _stage_of(name, num_layers) == stage:
                        tensors[name] = file.get_tensor(name)
        save_file(tensors, out / f"stage-{stage}.safetensors")


def transformers(source: Path, out: Path) -> None:
    """Load the model and save it again."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source).save_pretrained(out)


def mergekit(source: Path, out: Path) -> None:
    """mergekit's lazy loader and its writer of shards, a folder for each stage."""
    from mergekit.io import LazyTensorLoader, ShardedTensorIndex, TensorWriter

    index = ShardedTensorIndex.from_disk(str(source))
    num_layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    loader = LazyTensorLoader(index)
    for stage in range(NUM_STAGES):
        with TensorWriter(str(out / f"stage-{stage}")) as writer:
            for name in index.tensor_paths:
                if _stage_of(name, num_layers) == stage:
                    writer.save_tensor(name, loader.get_tensor(name))


def dcp(source: Path, out: Path) -> None:
    """torch.distributed.checkpoint's Hugging Face reader and writer."""
    import torch
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

    reader = HuggingFaceStorageReader(str(source))
    entries = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(source)))
    num_layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    mapping = {name: 1 + _stage_of(name, num_layers) for name in state}
    writer = HuggingFaceStorageWriter(str(out), fqn_to_index_mapping=mapping, thread_count=4)
    checkpoint.save(state, storage_writer=writer)


def dcp_save(source: Path, out: Path) -> None:
    """Write the weights and optimizer state of a training checkpoint with torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as checkpoint
    from safetensors.torch import load_file

    state = {
        f"{shard.parent.relative_to(source).parts[1:]}.{name}": tensor
        for shard in sorted(source.rglob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }
    checkpoint.save(state, checkpoint_id=out, no_dist=True)


def dcp_shards(source: Path, out: Path) -> None:
    """Write a model with torch.distributed.checkpoint, under torchrun: each rank its rows of each tensor."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(0)])
        for file in sorted(source.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    checkpoint.save(state, checkpoint_id=out)
    dist.destroy_process_group()


def dcp_again(source: Path, out: Path) -> None:
    """Load such a checkpoint as a whole, and save it."""
    import torch
    import torch.distributed.checkpoint as checkpoint

    entries = checkpoint.FileSystemReader(source).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    checkpoint.load(state, checkpoint_id=source, no_dist=True)
    checkpoint.save(state, checkpoint_id=out, no_dist=True)


def _stage_of(name: str, num_layers: int) -> int:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer:
        return int(layer[1]) * NUM_STAGES // num_layers
    return 0 if name.startswith("model.embed") else NUM_STAGES - 1


if __name__ == "__main__":
    peers = {
        "script": script, "transformers": transformers, "mergekit": mergekit, "dcp": dcp, "dcp-save": dcp_save,
        "dcp-shards": dcp_shards, "dcp-again": dcp_again,
    }  # fmt: skip
    peers[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
