"""Masters of a run in mixed precision, saved and resumed; tests/matrix.py has the gradients of each way to compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from manifests.store import open_shard
from stores.open import open_manifest
from tests.builders import pack
from tests.fast.runner.tiny import save_model
from tests.process.runner.training_jobs import job, run_jobs

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, num_hidden_layers=4, hidden_size=32, intermediate_size=80, tie_word_embeddings=True)
    return folder


def test_masters_are_saved_and_a_resumed_run_ends_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    packed, interleaved = tmp_path / "packed", tmp_path / "interleaved"
    pack(model, packed)
    pack(model, interleaved, "pp=2,vpp=2")
    flags = "--data synthetic --seq-len 16 --global-batch 4 --lr 1e-3 --dtype bf16 --master-dtype fp32"
    flags += " --ac full --loss-chunk 6"
    jobs = [
        job(root, tmp_path / name, *flags.split(), "--checkpoint", tmp_path / name / "saved", "--steps", 4, *more)
        for name, root, more in (
            ("whole", packed, ("--checkpoint-every", 2)),
            ("resumed", packed, ("--resume", tmp_path / "whole" / "saved" / "step-000002")),
            ("cut anew", interleaved, ("--resume", tmp_path / "whole" / "saved" / "step-000002")),
        )
    ]
    run_jobs(2, jobs)
    whole, *others = (tmp_path / name / "saved" / "step-000004" for name in ("whole", "resumed", "cut anew"))
    assert all(digests_in(resumed) == digests_in(whole) for resumed in others)
    training = open_manifest(whole).manifest.training
    assert training is not None
    assert (training.dtype, training.compute_dtype) == ("F32", "BF16")
    with safe_open(whole / "model-00001-of-00002.safetensors", "pt") as file:
        weight = file.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


def digests_in(checkpoint: Path) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for shard in open_manifest(checkpoint).manifest.shards:
        digests = open_shard(checkpoint, shard).digests(shard.path)
        found |= {(shard.holds, fqn): digest for fqn, digest in digests.items()}
    return found
