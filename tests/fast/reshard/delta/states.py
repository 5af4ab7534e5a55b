"""States of a tiny model, as a trainer makes them: from one to the next, a few bytes of some tensors change."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.builders import Tensor, llama_config, random_tensors, tensors_in, write_model

DTYPES = ("BF16", "F32", "F16", "F8_E4M3")


def changed(tensors: Mapping[str, Tensor], seed: int, *, share: float = 0.3) -> dict[str, Tensor]:
    """Return tensors of which some have a few other bytes; at least one has."""
    chance = random.Random(seed)
    new = dict(tensors)
    for number, (name, tensor) in enumerate(tensors.items()):
        if number == seed % len(tensors) or chance.random() < share:
            data = bytearray(tensor.data)
            for _ in range(3):
                data[chance.randrange(0, len(data), 2)] ^= 1 + chance.randrange(255)
            if bytes(data) == tensor.data:
                data[0] ^= 1
            new[name] = replace(tensor, data=bytes(data))
    return new


def write_states(folder: Path, number: int, *, num_shards: int = 2, **config: object) -> list[dict[str, bytes]]:
    """Write `v1` to `vN` below a folder, and return the bytes of their tensors."""
    settings = llama_config(**config)
    tensors = random_tensors(settings)
    states = []
    for version in range(1, number + 1):
        tensors = changed(tensors, version) if version > 1 else tensors
        write_model(folder / f"v{version}", settings, tensors, num_shards=num_shards)
        states.append(bytes_of(tensors))
    return states


def bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.data for name, tensor in tensors.items()}


def weights_in(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all safetensors files in a folder."""
    return bytes_of(tensors_in(folder))
