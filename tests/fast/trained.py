"""Training checkpoints without training: a packed model, and random moments beside its weights."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from tests.builders import (
    EMBEDDING,
    HEAD,
    Tensor,
    llama_config,
    llama_shapes,
    pack,
    random_bytes,
    random_tensors,
    read_safetensors,
    write_model,
)
from tests.fast.reshard.forged import change_manifest, digest, read_stage, shard_of

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE: Mapping[str, Any] = {
    "step": 60,
    "num_tokens": 7680,
    "dtype": "F32",
    "compute_dtype": None,
    "reduce_dtype": None,
    "optimizer": {
        "name": "AdamW",
        "max_norm": 0.5,
        "groups": [{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "fqns": []}],
    },
    "learning_rate": {
        "peak": 0.002,
        "warmup_steps": 3,
        "decay": "cosine",
        "decay_steps": 90,
        "minimum": 0.0002,
        "stable_steps": 0,
    },
    "batch": {"global_batch": 16, "microbatch": 2, "seq_len": 8},
    "data": {"num_sequences": 960, "digest": "blake3:" + 64 * "7", "cursor": None},
    "random": [{"rank": 0, "generator": "cpu", "state": "AAAA"}],
}


def random_moments(config: Mapping[str, Any], seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """Give both moments of every parameter in F32, those of a tied head the embedding's."""
    generator = random.Random(seed)
    found: dict[str, dict[str, Tensor]] = {}
    for moment in MOMENTS:
        found[moment] = {
            fqn: Tensor(dtype="F32", shape=shape, data=random_bytes(generator, prod(shape), "F32"))
            for fqn, shape in llama_shapes(config).items()
        }
        if config["tie_word_embeddings"]:
            found[moment][HEAD] = found[moment][EMBEDDING]
    return found


def write_trained(folder: Path, layout: str, *, seed: int = 0, **config: Any) -> Path:
    """Pack a model of random F32 weights in `folder`, give it moments and state, and give where it is."""
    sizes = llama_config(**config)
    write_model(folder / "source", sizes, random_tensors(sizes, dtypes=["F32"], seed=seed))
    out = folder / "trained"
    pack(folder / "source", out, layout)
    for index in range(len(json.loads((out / "manifest.json").read_text())["stages"])):
        for moment, tensors in random_moments(sizes, seed).items():
            write_moments(out, index, moment, {fqn: tensors[fqn] for fqn in sorted(read_stage(out, index))})
    change_manifest(out, lambda document: document.update(training=dict(STATE)))
    return out


def write_trained_head(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """As `write_trained`, a model whose files have the head, to which the embedding is tied, and not the embedding."""
    sizes = llama_config(tie_word_embeddings=True)
    weights = random_tensors(sizes, dtypes=["F32"])
    weights[HEAD] = weights.pop(EMBEDDING)
    write_model(folder / "source", sizes, weights)
    out = folder / "trained"
    pack(folder / "source", out, "pp=1")
    moments = {
        kind: {fqn: one for fqn, one in tensors.items() if fqn in weights}
        for kind, tensors in random_moments(sizes).items()
    }
    for kind, tensors in moments.items():
        write_moments(out, 0, kind, tensors)
    change_manifest(out, lambda document: document.update(training=dict(STATE)))
    return out, weights, moments


def write_moments(out: Path, index: int, moment: str, tensors: Mapping[str, Tensor]) -> None:
    """Write one stage's moments as SPEC.md says a shard is written, and their line in the manifest."""
    head, data = shard_of(tensors)
    path = f"stage-{index:03d}/{moment}/model.safetensors"
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    (out / path).write_bytes(head + data)
    shard = {"path": path, "nbytes": len(head) + len(data), "digest": digest(head), "holds": moment}

    def change(document: dict[str, Any]) -> None:
        shards = document["stages"][index]["shards"]
        shards[:] = [*(other for other in shards if other["path"] != path), shard]

    change_manifest(out, change)


def read_moments(out: Path, index: int, moment: str) -> dict[str, Tensor]:
    return read_safetensors((out / f"stage-{index:03d}" / moment / "model.safetensors").read_bytes())
