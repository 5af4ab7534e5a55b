"""A pack that was killed is resumed, and writes the bytes of one that was not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from manifests.models import model_shape
from manifests.safetensors import read_header
from tests.builders import weights_path

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[4]
TOTAL_NBYTES = 340 << 20
COMMIT_S = 0.02  # part of the time between the manifest and the end of the process
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
    command = [sys.executable, "-m", "reshard", "pack", str(source), "--layout", "pp=4", "--out", str(out)]
    return [*command, "--quiet", "--no-sync"]


def kill_at(command: list[str], out: Path, nbytes: int, commit_s: float | None) -> None:
    """Kill a pack when so many bytes are on disk or, if it is to come that far, so long after its manifest is."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    partial = out.with_name(f".{out.name}.partial")
    while process.poll() is None and (commit_s is not None or written_nbytes(partial) < nbytes):
        if commit_s is not None and (partial / "manifest.json").exists():
            time.sleep(commit_s)
            break
        time.sleep(0.0005)
    process.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), errors


def written_nbytes(folder: Path) -> int:
    """Count what a folder's files take on disk; they are at their full length from the start."""
    with contextlib.suppress(FileNotFoundError):  # it is being renamed
        return sum(512 * path.stat().st_blocks for path in folder.rglob("*"))
    return 0


def same_bytes(left: Path, right: Path) -> bool:
    return subprocess.run(["diff", "-r", "--exclude=manifest.json", str(left), str(right)]).returncode == 0


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 220))])
def test_killed_pack_resumes_to_the_bytes_of_an_uninterrupted_one(
    source: Path, whole: Path, tmp_path: Path, seed: int
) -> None:
    chance, out = random.Random(seed), tmp_path / "out"
    for _ in range(chance.randint(1, 3)):
        commit_s = chance.uniform(0, COMMIT_S) if chance.random() < 0.2 else None
        kill_at(pack(source, out), out, chance.randrange(TOTAL_NBYTES), commit_s)
        if out.exists():
            break
    assert out.exists() or subprocess.run(pack(source, out), cwd=ROOT, timeout=60).returncode == 0
    assert same_bytes(whole, out)
    assert json.loads((out / "manifest.json").read_text()) == json.loads((whole / "manifest.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    shutil.rmtree(out)  # pytest would keep all of them


def test_resumed_pack_does_not_copy_again_what_is_done(source: Path, whole: Path, tmp_path: Path) -> None:
    copied = tmp_path / "source"
    subprocess.run(["cp", "-r", str(source), str(copied)], check=True)
    partial = left_by_a_kill(copied, tmp_path)
    done = done_in(partial)
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
        shard = weights_path(stage, 4)
        assert (whole / shard).read_bytes() == (tmp_path / "out" / shard).read_bytes()


def test_damage_to_what_was_written_is_found_and_fixed(source: Path, whole: Path, tmp_path: Path) -> None:
    partial = left_by_a_kill(source, tmp_path)
    entry = done_in(partial)
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


def runs_in(journal: Path) -> list[dict[str, Any]]:
    """Return the runs of tensors that a journal lists, without tied replicas, which are copied a second time."""
    lines = [line for line in journal.read_text().splitlines(keepends=True)[1:] if line.endswith("\n")]
    return [run for run in map(json.loads, lines) if "/tied/" not in run["output"]]


def done_in(partial: Path) -> dict[str, Any]:
    return runs_in(partial / ".journal")[0]


def left_by_a_kill(source: Path, folder: Path) -> Path:
    """Kill a pack as soon as its journal has a line, and return what it left."""
    journal = folder / ".out.partial" / ".journal"
    process = subprocess.Popen(pack(source, folder / "out"), cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (journal.exists() and runs_in(journal)):
        time.sleep(0.002)
    assert process.poll() is None, "the pack was done before it could be killed"
    process.kill()
    process.wait()
    return journal.parent
