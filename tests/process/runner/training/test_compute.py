"""Recomputed, compiled and mixed-precision pipelines of two ranks against plain ones, by their gradients."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from manifests.store import open_shard
from stores.open import open_manifest
from tests.builders import pack
from tests.fast.runner.tiny import save_model
from tests.process.runner.training.compute_cases import COMPILED, REST, SPANNING, Case
from tests.process.runner.training_jobs import job, run_jobs
from tests.process.torchrun import launch

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, num_hidden_layers=4, hidden_size=32, intermediate_size=80, tie_word_embeddings=True)
    return folder


def check(model: Path, out: Path, cases: tuple[Case, ...], which: str) -> None:
    launch(2, "runner/training/compute_worker.py", model, out / which, which, timeout_s=500)
    for rank in (0, 1):
        found = json.loads((out / f"{which}-{rank}.json").read_text())
        assert {str(case): found[str(case)] for case in cases if found[str(case)] > case.tolerance} == {}


def test_every_way_to_compute_gives_the_gradients_of_the_plain_one(model: Path, tmp_path: Path) -> None:
    check(model, tmp_path, SPANNING, "spanning")


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


@pytest.mark.slow
def test_every_way_on_every_schedule(model: Path, tmp_path: Path) -> None:
    check(model, tmp_path, REST, "rest")


@pytest.mark.slow
def test_compiled_layers_give_the_gradients_of_the_plain_ones(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("NO C++ COMPILER: torch.compile on the CPU was not tested")
    # A rank that was killed while it compiled leaves half a library in the shared cache.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    check(model, tmp_path, COMPILED, "compiled")
