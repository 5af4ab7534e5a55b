"""A pack that was killed goes on where it was, and ends with the bytes of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from manifests.models import model_shape
from manifests.safetensors import read_header

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 340 MB of random weights in one file: enough runs to be killed between them."""
    folder = tmp_path_factory.mktemp("resume") / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    noise = np.random.default_rng(0)
    shapes = model_shape(CONFIG).tensors
    weights = {fqn: noise.integers(0, 1 << 16, shape, np.uint16).view(np.float16) for fqn, shape in shapes.items()}
    save_file({fqn: weight for fqn, weight in weights.items() if fqn != "lm_head.weight"}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    out = source.parent / "whole"
    assert subprocess.run(pack(source, out), cwd=ROOT, timeout=60).returncode == 0
    return out


def pack(source: Path, out: Path) -> list[str]:
    command = [sys.executable, "-m", "reshard.cli", "pack", str(source), "--layout", "pp=4", "--out", str(out)]
    return [*command, "--quiet", "--no-sync"]


def killed_after(command: list[str], seconds: float) -> int:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode


def same_bytes(left: Path, right: Path) -> bool:
    return subprocess.run(["diff", "-r", "--exclude=manifest.json", str(left), str(right)]).returncode == 0


@pytest.mark.parametrize("seed", range(20))
def test_killed_pack_resumes_to_the_bytes_of_an_uninterrupted_one(
    source: Path, whole: Path, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    out = tmp_path / "out"
    for _ in range(3):
        killed_after(pack(source, out), chance.uniform(0.05, 0.6))
        if out.exists():
            break
    assert out.exists() or subprocess.run(pack(source, out), cwd=ROOT, timeout=60).returncode == 0
    assert same_bytes(whole, out)
    assert json.loads((out / "manifest.json").read_text()) == json.loads((whole / "manifest.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_resumed_pack_does_not_copy_again_what_is_done(source: Path, whole: Path, tmp_path: Path) -> None:
    copied = tmp_path / "source"
    subprocess.run(["cp", "-r", str(source), str(copied)], check=True)
    partial = left_by_a_kill(copied, tmp_path)
    done = json.loads((partial / ".journal").read_text().splitlines()[1])
    bundle, weights = read_header(whole / done["output"]), copied / "model.safetensors"
    name = next(entry.name for entry in bundle.tensors if bundle.nbytes + entry.begin == done["position"])
    # Spoil that tensor in the source behind the back of its size and time: nobody looks at it again.
    found, header = weights.stat(), read_header(weights)
    with open(weights, "r+b") as file:
        file.seek(header.nbytes + next(entry.begin for entry in header.tensors if entry.name == name))
        file.write(b"\xff" * 64)
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert subprocess.run(pack(copied, tmp_path / "out"), cwd=ROOT, timeout=60).returncode == 0
    for stage in range(4):
        shard = f"stage-00{stage}/model.safetensors"
        assert (whole / shard).read_bytes() == (tmp_path / "out" / shard).read_bytes()


def test_damage_to_what_was_done_is_found_and_mended(source: Path, whole: Path, tmp_path: Path) -> None:
    partial = left_by_a_kill(source, tmp_path)
    entry = json.loads((partial / ".journal").read_text().splitlines()[1])
    with open(partial / entry["output"], "r+b") as file:
        file.seek(entry["position"] + 12345)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert subprocess.run(pack(source, tmp_path / "out"), cwd=ROOT, timeout=60).returncode == 0
    assert same_bytes(whole, tmp_path / "out")


def test_changed_source_starts_over(source: Path, tmp_path: Path) -> None:
    copied = tmp_path / "source"
    subprocess.run(["cp", "-r", str(source), str(copied)], check=True)
    left_by_a_kill(copied, tmp_path)
    with open(copied / "model.safetensors", "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x12\x34")
    assert subprocess.run(pack(copied, tmp_path / "out"), cwd=ROOT, timeout=60).returncode == 0
    assert subprocess.run(pack(copied, tmp_path / "again"), cwd=ROOT, timeout=60).returncode == 0
    assert same_bytes(tmp_path / "again", tmp_path / "out")


def left_by_a_kill(source: Path, folder: Path) -> Path:
    """Kill a pack as soon as its journal has a line, and give what it left."""
    journal = folder / ".out.partial" / ".journal"
    process = subprocess.Popen(pack(source, folder / "out"), cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 2):
        time.sleep(0.002)
    assert process.poll() is None, "the pack was done before it could be killed"
    process.kill()
    process.wait()
    return journal.parent
