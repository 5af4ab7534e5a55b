"""Training checkpoints as ranks that share a stage write them: every tensor cut in slices, a shard for each rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from tests.builders import INDEX, Tensor, header_of, read_safetensors
from tests.fast.reshard.forged import change_manifest, digest, fit_index

KINDS = ("weights", "exp_avg", "exp_avg_sq")
_WIDTHS = {"F32": 4, "BF16": 2}

Slice = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape
Cut = Callable[[tuple[int, ...]], list[Slice]]


def rows(count: int) -> Cut:
    """Cut the first axis as FSDP does: parts of equal length, the last ones shorter or empty."""

    def cut(shape: tuple[int, ...]) -> list[Slice]:
        length = -(-shape[0] // count)
        edges = [min(part * length, shape[0]) for part in range(count + 1)]
        return [((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])) for begin, end in pairwise(edges)]

    return cut


def grid(*counts: int) -> Cut:
    """Cut each axis in so many parts of whatever lengths."""

    def cut(shape: tuple[int, ...]) -> list[Slice]:
        axes = [
            list(pairwise([size * part // count for part in range(count + 1)]))
            for size, count in zip(shape, counts, strict=False)
        ]
        return [(tuple(begin for begin, _ in box), tuple(end - begin for begin, end in box)) for box in product(*axes)]

    return cut


def columns_of_matrices(shape: tuple[int, ...]) -> list[Slice]:
    """Cut matrices as a row-parallel linear layer is cut, and leave vectors whole."""
    return grid(1, 2)(shape) if len(shape) > 1 else [((0,), shape)]


CUTS: Mapping[str, Cut] = {
    "rows": rows(2),
    "rows, some empty": rows(15),
    "columns": columns_of_matrices,
    "both": grid(2, 2),
    "uneven": grid(3, 5),
}


def cut_up(out: Path, cut: Cut, kinds: tuple[str, ...] = KINDS) -> None:
    """Rewrite every shard of a checkpoint as shards of slices, as SPEC.md says; a tensor has as many as `cut` gives."""
    for stage in json.loads((out / "manifest.json").read_text())["stages"]:
        for kind in kinds:
            tensors = {}
            for shard in (shard for shard in stage["shards"] if shard["holds"] == kind):
                tensors |= read_safetensors((out / shard["path"]).read_bytes())
                (out / shard["path"]).unlink()
            split = {fqn: cut(tensor.shape) for fqn, tensor in tensors.items()}
            held = [
                {fqn: (tensors[fqn], boxes[number]) for fqn, boxes in split.items() if number < len(boxes)}
                for number in range(max(map(len, split.values())))
            ]
            _write(out, stage["index"], kind, [{fqn: _box(*one) for fqn, one in shard.items()} for shard in held])
    if (out / INDEX).exists():
        fit_index(out)


def slices_in(out: Path, stage: int, kind: str) -> list[dict[str, tuple[Tensor, list[int], list[int]]]]:
    """Give what each shard of one kind holds: a slice, its offset and the shape of the whole."""
    document = json.loads((out / "manifest.json").read_text())["stages"][stage]
    found = []
    for shard in (shard for shard in document["shards"] if shard["holds"] == kind):
        data = (out / shard["path"]).read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        table = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        tensors = read_safetensors(data)
        assert table.keys() == tensors.keys()
        found.append({fqn: (tensors[fqn], part["saved_offsets"], part["shape"]) for fqn, part in sorted(table.items())})
    return found


def rewrite_slices(
    out: Path, stage: int, kind: str, change: Callable[[list[dict[str, tuple[Tensor, list[int], list[int]]]]], object]
) -> None:
    """Change the slices of one kind, and fit every digest and count."""
    shards = slices_in(out, stage, kind)
    change(shards)
    _write(out, stage, kind, shards)


def _box(tensor: Tensor, box: Slice) -> tuple[Tensor, list[int], list[int]]:
    offset, shape = box
    values = np.frombuffer(tensor.data, f"V{_WIDTHS[tensor.dtype]}").reshape(tensor.shape)
    part = values[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]
    return Tensor(dtype=tensor.dtype, shape=shape, data=part.tobytes()), list(offset), list(tensor.shape)


def _write(out: Path, index: int, kind: str, shards: list[dict[str, tuple[Tensor, list[int], list[int]]]]) -> None:
    lines = []
    for number, held in enumerate(shards):
        head, data = _shard_of(held)
        folder = f"stage-{index:03d}" if kind == "weights" else f"stage-{index:03d}/{kind}"
        path = f"{folder}/model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_bytes(head + data)
        lines.append({"path": path, "nbytes": len(head) + len(data), "digest": digest(head), "holds": kind})

    def change(document: dict[str, Any]) -> None:
        stage = document["stages"][index]
        stage["shards"] = [*(shard for shard in stage["shards"] if shard["holds"] != kind), *lines]
        stage["shards"].sort(key=lambda shard: KINDS.index(shard["holds"]))
        if kind == "weights":
            stage["num_tensors"] = len({fqn for held in shards for fqn in held})
            stage["nbytes"] = sum(len(tensor.data) for held in shards for tensor, _, _ in held.values())

    change_manifest(out, change)


def _shard_of(held: Mapping[str, tuple[Tensor, list[int], list[int]]]) -> tuple[bytes, bytes]:
    table = {fqn: {"saved_offsets": offset, "shape": whole} for fqn, (_, offset, whole) in held.items()}
    tensors = {fqn: tensor for fqn, (tensor, _, _) in held.items()}
    words = " ".join(blake3(tensor.data).hexdigest() for tensor in tensors.values())
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(table), "blake3": words}
    text = json.dumps(header_of(tensors, metadata=metadata)).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return len(text).to_bytes(8, "little") + text, b"".join(tensor.data for tensor in tensors.values())
