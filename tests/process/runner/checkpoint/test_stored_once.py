"""Checkpoints of runs that freeze weights: each byte is on disk once, and each checkpoint is whole by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.formats.open import open_source
from tests.builders import files_in, pack, run
from tests.fast.reshard.delta.states import weights_in
from tests.process.runner.training.test_frozen import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ONLY = ("--train-only", r"layers\.1\.", "--lr", "1e-2")


def written_nbytes(folders: list[Path]) -> list[int]:
    """Return how many bytes of each folder are in no folder before."""
    seen, sizes = set[int](), []
    for folder in folders:
        files = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        sizes.append(sum(size for number, size in files.items() if number not in seen))
        seen |= files.keys()
    return sizes


def saved_nbytes(log: Path) -> list[int]:
    records = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    return [record["save_nbytes"] for record in records if "save_nbytes" in record]


@pytest.mark.parametrize("flags", [(), ("--checkpoint-sync",), ("--dp-shard", "2")], ids=["async", "sync", "slices"])
def test_frozen_tensors_are_written_with_the_first_checkpoint_alone(
    packed: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    history = tmp_path / "checkpoints"
    options = (*ONLY, *flags, "--checkpoint", history, "--checkpoint-every", "1")
    launched = pack(packed, tmp_path / "alone", "pp=1") if "--dp-shard" in flags else packed
    ranks = ("--nproc-per-node", "2")
    train(launched, tmp_path / "log", *options, "--steps", "2", launch=ranks)
    folders = [history / f"step-{step:06d}" for step in (1, 2, 3)]
    train(launched, tmp_path / "again", *options, "--steps", "3", "--resume", "auto", "--save", tmp_path / "saved",
          launch=ranks)  # fmt: skip
    sizes = written_nbytes(folders)
    shards = [sum(file.stat().st_size for file in folder.rglob("*.safetensors")) for folder in folders]
    assert shards[0] == shards[1] == shards[2]
    saves = saved_nbytes(tmp_path / "log") + saved_nbytes(tmp_path / "again")
    assert saves[0] == shards[0]
    before = open_source(str(launched)).tensors
    trained = {fqn for fqn in before if "layers.1." in fqn}
    frozen_nbytes = sum(tensor.nbytes for fqn, tensor in before.items() if fqn not in trained)
    for size, saved in zip(sizes[1:], saves[1:], strict=True):  # also by a run that resumes
        assert sizes[0] - size >= frozen_nbytes
        assert saved < saves[0] - frozen_nbytes
    for folder in folders[:2]:
        run("verify", folder)
    for path in (tmp_path / "saved").rglob("*"):
        assert path.stat().st_nlink == 1 or path.is_dir(), "--save refers to nothing"
    newest = files_in(folders[2])
    for folder in folders[:2]:  # as --keep does
        for path in folder.rglob("*.safetensors"):
            path.unlink()
    assert files_in(folders[2]) == newest
    run("verify", folders[2])
    run("export", folders[2], "--to", "hf", "--out", tmp_path / "hf")
    weights = weights_in(tmp_path / "hf")
    run("export", launched, "--to", "hf", "--out", tmp_path / "hf-before")
    assert {fqn for fqn, data in weights_in(tmp_path / "hf-before").items() if weights[fqn] != data} == trained


def test_keep_prunes_checkpoints_that_share_files(packed: Path, tmp_path: Path) -> None:
    history = tmp_path / "checkpoints"
    train(packed, tmp_path / "log", *ONLY, "--steps", "4", "--checkpoint", history, "--checkpoint-every", "1",
          "--keep", "1")  # fmt: skip
    assert [path.name for path in history.iterdir() if path.is_dir()] == ["step-000004"]
    run("verify", history / "step-000004")
    assert all(path.stat().st_nlink == 1 for path in history.rglob("*.safetensors"))


def test_checkpoints_of_adapters_have_no_weights_of_the_base(packed: Path, tmp_path: Path) -> None:
    history = tmp_path / "checkpoints"
    train(packed, tmp_path / "log", "--lora-rank", "4", "--lr", "1e-2", "--steps", "2", "--checkpoint", history,
          "--checkpoint-every", "1")  # fmt: skip
    first, second = written_nbytes([history / "step-000001", history / "step-000002"])
    base = sum(path.stat().st_size for path in packed.rglob("*.safetensors"))
    assert first == pytest.approx(second, rel=0.02)
    assert first < base
