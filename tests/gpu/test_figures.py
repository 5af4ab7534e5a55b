"""Figures of a device beside those of other tools, by the benchmarks of bench/, which check results before they time.

On a GPU they go to bench/results/gpu-*.json; twins of tiny sizes see that the benchmarks run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench import measure
from runner.bundle.packed import open_packed
from runner.load.load import load_tensors
from runner.models import family_for
from runner.pipeline.chunk import build_chunks, hf_pieces, materialize
from stores.bundles import Bundles
from tests.fast.runner.tiny import save_model
from tests.gpu.conftest import Record
from tests.gpu.jobs import pack

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
on_devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


def figures(device: str, tmp_path: Path, script: str, *args: str) -> dict[str, Any]:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(measure.ROOT / "bench" / script), "--device", device, *args, "--out", str(out)]
    subprocess.run(command, check=True, cwd=measure.ROOT, stdout=subprocess.DEVNULL, timeout=350)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stage_is_loaded_as_safetensors_loads_it(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Through pinned memory to a GPU, in many blocks, with and without a cast."""
    save_model(tmp_path / "llama", vocab_size=24000, num_hidden_layers=2)  # an embedding of more than a block
    found = open_packed(pack(tmp_path / "llama", 2))
    family = family_for(found.config, max_seq_len=16)
    (chunk,) = build_chunks(family, found.stage_modules, (0,))
    materialize(chunk, device=torch.device(device), dtype=dtype)
    load_tensors(hf_pieces(chunk), Bundles(found.manifest, found.root), found.shape)
    (shard,) = found.manifest.stages[0].shards
    expected = load_file(found.root / shard.path, device=device)
    pieces = {piece.fqn: piece.memory for piece in hf_pieces(chunk)}
    assert pieces.keys() == expected.keys()
    for fqn, tensor in expected.items():
        assert torch.equal(pieces[fqn], tensor.to(dtype)), fqn


@on_devices
def test_load_beside_other_loaders(device: str, tmp_path: Path, record: Record) -> None:
    is_gpu = device == "cuda"
    size = ("--gb", "4", "--runs", "3") if is_gpu else ("--gb", "0.02", "--width", "128", "--runs", "1")
    result = figures(device, tmp_path, "load.py", *size)
    record("load", result)
    assert {"runner", "load_file"} <= result["warm"].keys()
    assert result["warm"]["runner"]["nbytes"] == result["warm"]["load_file"]["nbytes"]


@on_devices
def test_pause_of_a_save_beside_a_plain_copy(device: str, tmp_path: Path, record: Record) -> None:
    is_gpu = device == "cuda"
    size = ("--gb", "4", "--turns", "5") if is_gpu else ("--gb", "0.02", "--width", "128", "--turns", "1")
    result = figures(device, tmp_path, "saving.py", *size)
    record("saving", result)
    (rank,) = result["1 ranks"]
    assert len(rank["stall_s"]) == result["turns"]
    if is_gpu:
        assert rank["ratio"] <= 1.5


@on_devices
def test_step_beside_a_save(device: str, tmp_path: Path, record: Record) -> None:
    result = figures(device, tmp_path, "beside.py", *(() if device == "cuda" else ("--runs", "1")))
    record("beside", result)
    for run in result["runs"].values():
        assert run["steps beside"]
        assert run["steps alone"]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_norm_beside_one_in_float64(device: str, tmp_path: Path, record: Record) -> None:
    record("norm", figures(device, tmp_path, "growth.py", "--runs", "99"))


@on_devices
def test_mfu_of_a_step_beside_plain_pytorch(device: str, tmp_path: Path, record: Record) -> None:
    is_gpu = device == "cuda"
    result = figures(device, tmp_path, "mfu.py", "--turns", "7" if is_gpu else "1")
    record("mfu", result)
    assert result["parameters"] > 0
    if is_gpu:
        assert result["ratio_to_plain"] <= 1.1
