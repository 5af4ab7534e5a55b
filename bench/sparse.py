"""A model's checkpoint at its true shape, as sparse files: real headers, and data that takes no disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manifests.models import ModelShape, model_shape
from manifests.safetensors import DTYPE_BITS, encode_header, layout_tensors, nbytes_of

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseCheckpoint:
    num_tensors: int
    num_shards: int
    nbytes: int  # of the weight files, headers included


def write_sparse(folder: Path, config: Mapping[str, object], num_shards: int) -> SparseCheckpoint:
    """Write a Hugging Face folder whose weights are zeros in sparse files.

    Tensors are distributed over shards in the model's order, as evenly as whole tensors allow; within a shard they
    are ordered as by the safetensors library: widest dtype first, then by name.
    """
    shape = model_shape(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {fqn: (_stored_dtype(fqn, shape), dims) for fqn, dims in shape.tensors.items()}
    shards: list[list[str]] = [[] for _ in range(num_shards)]
    total, dealt = sum(nbytes_of(*tensor) for tensor in tensors.values()), 0
    for fqn, tensor in tensors.items():
        shards[min(dealt * num_shards // total, num_shards - 1)].append(fqn)
        dealt += nbytes_of(*tensor)
    weight_map, nbytes = {}, 0
    for number, fqns in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{num_shards:06d}.safetensors"
        in_order = sorted(fqns, key=lambda fqn: (-DTYPE_BITS[tensors[fqn][0]], fqn))
        entries = layout_tensors((fqn, *tensors[fqn]) for fqn in in_order)
        header = encode_header(entries, {"format": "pt"}, alignment=8)
        with open(folder / name, "wb") as file:
            file.write(header)
            nbytes += file.truncate(len(header) + entries[-1].end)
        weight_map |= dict.fromkeys(fqns, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return SparseCheckpoint(num_tensors=len(tensors), num_shards=num_shards, nbytes=nbytes)


def _stored_dtype(fqn: str, shape: ModelShape) -> str:
    """Quantized weights in 8 bits, their scales and the router's bias in 32, all else in 16."""
    if fqn.endswith(("_scale_inv", ".e_score_correction_bias")):
        return "F32"
    return "F8_E4M3" if f"{fqn}_scale_inv" in shape.tensors else "BF16"
