"""Checkpoints changed by hand, with every digest made to fit again: what only the laws can refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from blake3 import blake3

from tests.builders import INDEX, Tensor, edit_manifest, header_of, index_of, read_safetensors


def digest(data: bytes) -> str:
    return f"blake3:{blake3(data).hexdigest()}"


def change_manifest(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite manifest.json."""
    edit_manifest(out, change)


def change_file(out: Path, name: str, data: bytes) -> None:
    """Rewrite a carried file, and its line in the manifest."""
    (out / name).write_bytes(data)

    def change(document: dict[str, Any]) -> None:
        file = next(file for file in document["files"] if file["path"] == name)
        file |= {"nbytes": len(data), "digest": digest(data)}

    change_manifest(out, change)


def read_stage(out: Path, index: int) -> dict[str, Tensor]:
    """Return a stage's weights."""
    return {fqn: tensor for tensors in _read_shards(out, index).values() for fqn, tensor in tensors.items()}


def change_stage(out: Path, index: int, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite a stage's shards of weights as SPEC.md says a shard is written, with its lines in manifest and index.

    A tensor stays in its shard, and a new one comes into the first; a shard without any is removed.
    """
    before, tensors = _read_shards(out, index), read_stage(out, index)
    change(tensors)
    homes = {fqn: path for path, held in before.items() for fqn in held}
    lines = []
    for path in before:
        held = {fqn: tensor for fqn, tensor in tensors.items() if homes.get(fqn, next(iter(before))) == path}
        (out / path).unlink()
        if held:
            head, data = shard_of(held)
            (out / path).write_bytes(head + data)
            lines.append({"path": path, "nbytes": len(head) + len(data), "digest": digest(head)})

    def fit(document: dict[str, Any]) -> None:
        stage = document["stages"][index]
        stage |= {"num_tensors": len(tensors), "nbytes": sum(len(tensor.data) for tensor in tensors.values())}
        stage["shards"] = lines

    change_manifest(out, fit)
    if (out / INDEX).exists():
        fit_index(out)


def fit_index(out: Path) -> None:
    """Rewrite the index so that it lists what is in the shards of the root, or remove it if there are none."""
    shards = {path.name: read_safetensors(path.read_bytes()) for path in sorted(out.glob("*.safetensors"))}
    total_nbytes = sum(len(tensor.data) for tensors in shards.values() for tensor in tensors.values())
    (out / INDEX).unlink()
    if shards:
        (out / INDEX).write_bytes(index_of(shards, total_nbytes))


def _read_shards(out: Path, index: int) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a stage's shards of weights, by path."""
    shards = json.loads((out / "manifest.json").read_bytes())["stages"][index]["shards"]
    paths = [shard["path"] for shard in shards if shard.get("holds", "weights") == "weights"]
    return {path: read_safetensors((out / path).read_bytes()) for path in paths}


def shard_of(tensors: Mapping[str, Tensor]) -> tuple[bytes, bytes]:
    assert all(prod(tensor.shape) for tensor in tensors.values())
    words = " ".join(blake3(tensor.data).hexdigest() for tensor in tensors.values())
    text = json.dumps(header_of(tensors, metadata={"format": "pt", "blake3": words})).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return len(text).to_bytes(8, "little") + text, b"".join(tensor.data for tensor in tensors.values())
