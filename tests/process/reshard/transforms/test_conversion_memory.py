"""Law 4 for what changes bytes: casting, dequantizing and merging slices take the same memory whatever the tensors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manifests.models import model_shape
from manifests.safetensors import encode_header, layout_tensors
from tests.builders import files_in, llama_config, pack, reshard
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.forged import change_manifest
from tests.fast.sliced import CUTS, cut_up
from tests.fast.trained import STATE
from tests.servers.hub import serve_hub

ROOT = Path(__file__).parents[4]
MOST_NBYTES = 130 << 20  # of which Python, numpy and the verbs take about a third; the largest tensor has more
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
# Prints the most memory that it ever had in use; getrusage would count the process that it was forked from.
MEASURED = """
import sys
from reshard.cli import main as cli
try:
    cli()
finally:
    print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""


def peak_nbytes(*args: str | Path) -> int:
    """Run a command, and give its peak of memory, files that it maps included."""
    command = [sys.executable, "-c", MEASURED, *map(str, args), "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stderr.splitlines()[-1])


def write_zeros(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model of zeros; files with holes take no room."""
    model = model_shape(config)
    shapes, tied = model.tensors, {fqn for group in model.ties for fqn in group[1:]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    entries = layout_tensors(
        (fqn, "F8_E4M3" if f"{fqn}_scale_inv" in shapes else "F32", shape)
        for fqn, shape in shapes.items()
        if fqn not in tied
    )
    with open(folder / "model.safetensors", "wb") as file:
        file.write(encode_header(entries, {"format": "pt"}, alignment=8))
        file.truncate(file.tell() + entries[-1].end)
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a model whose embedding takes 256 MiB."""
    config = llama_config(hidden_size=1024, vocab_size=1 << 16, num_hidden_layers=2, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("memory")
    source = write_zeros(folder / "source", config)
    return pack(source, folder / "packed", "pp=1")


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_cast_takes_no_more_for_a_large_tensor(dtype: str, packed: Path, tmp_path: Path) -> None:
    args = ("export", packed, "--to", "hf", "--dtype", dtype, "--no-sync", "--out", tmp_path / dtype)
    assert peak_nbytes(*args) < MOST_NBYTES


@pytest.mark.parametrize("cut", ["rows", pytest.param("columns", marks=pytest.mark.slow)])
def test_merged_slices_take_no_more_for_a_large_tensor(cut: str, packed: Path, tmp_path: Path) -> None:
    sliced = tmp_path / "sliced"
    shutil.copytree(packed, sliced)
    cut_up(sliced, CUTS[cut], kinds=("weights",))
    change_manifest(sliced, lambda document: document.update(training={**STATE, "optimizer": None}))
    args = ("pack", sliced, "--layout", "pp=1", "--merge-slices", "--no-sync", "--out", tmp_path / "merged")
    assert peak_nbytes(*args) < MOST_NBYTES
    assert reshard("diff", tmp_path / "merged", packed).code == 0


def test_dequantized_weights_take_no_more_for_a_large_tensor(tmp_path: Path) -> None:
    config = read_config(
        "tiny-deepseek-v3", hidden_size=4096, intermediate_size=32768, num_hidden_layers=1, quantization_config=FP8
    )
    source = write_zeros(tmp_path / "source", config)
    args = ("pack", source, "--layout", "pp=1", "--dequantize", "bf16", "--no-sync", "--out", tmp_path / "out")
    assert peak_nbytes(*args) < MOST_NBYTES


@pytest.mark.parametrize("cut", [None, "columns"])
def test_conversion_of_a_remote_source_takes_the_memory_of_its_requests(
    cut: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four threads reads a tensor of 32 MiB, or its slices."""
    size = ("--max-shard-size", "32MB")
    config = llama_config(hidden_size=1024, intermediate_size=8192, vocab_size=8192, num_hidden_layers=1)
    packed = pack(write_zeros(tmp_path / "source", config), tmp_path / "packed", "pp=1", *size)
    if cut is not None:
        cut_up(packed, CUTS[cut], kinds=("weights",))
        change_manifest(packed, lambda document: document.update(training={**STATE, "optimizer": None}))
    how = ("--dtype", "bf16") if cut is None else ("--merge-slices",)
    limits = ("--threads", "4", "--io-memory", "8MB")
    with serve_hub() as hub:
        hub.push("org/model", files_in(packed))
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        args = ("pack", "hf://org/model", "--layout", "pp=1", *how, *size, *limits, "--no-sync")
        assert peak_nbytes(*args, "--out", tmp_path / "out") < MOST_NBYTES
