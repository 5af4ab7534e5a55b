"""Checkpoints changed by hand, with every digest made to fit again: what only the laws can refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from blake3 import blake3

from tests.builders import Tensor, edit_manifest, header_of, read_safetensors

__all__ = ["change_file", "change_manifest", "change_stage", "digest", "read_stage", "shard_of"]


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
    """Return the tensors of a stage's one shard."""
    return read_safetensors((out / f"stage-{index:03d}" / "model.safetensors").read_bytes())


def change_stage(out: Path, index: int, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite a stage's one shard as SPEC.md says a shard is written, and its lines in the manifest."""
    tensors = read_stage(out, index)
    change(tensors)
    head, data = shard_of(tensors)
    path = f"stage-{index:03d}/model.safetensors"
    (out / path).write_bytes(head + data)

    def fit(document: dict[str, Any]) -> None:
        stage = document["stages"][index]
        stage |= {"num_tensors": len(tensors), "nbytes": len(data)}
        stage["shards"] = [{"path": path, "nbytes": len(head) + len(data), "digest": digest(head)}]

    change_manifest(out, fit)


def shard_of(tensors: Mapping[str, Tensor]) -> tuple[bytes, bytes]:
    assert all(prod(tensor.shape) for tensor in tensors.values())
    words = " ".join(blake3(tensor.data).hexdigest() for tensor in tensors.values())
    text = json.dumps(header_of(tensors, metadata={"format": "pt", "blake3": words})).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return len(text).to_bytes(8, "little") + text, b"".join(tensor.data for tensor in tensors.values())
