"""What becomes of a folder of checkpoints, and of its run, when something in it is damaged, launched or in the way.

One rank trains; each run starts from scratch, from files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from manifests.store import read_manifest
from runner.checkpoint.history import checkpoint_path
from tests.builders import reshard
from tests.fast.runner.tiny import save_model
from tests.process.torchrun import launch

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for 4 steps, saving after 2 and 4, and begin others with what that left."""
    place = tmp_path_factory.mktemp("histories")
    save_model(place / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=80)
    assert reshard("pack", place / "model", "--layout", "pp=1", "--out", place / "packed").code == 0
    run_jobs(place, job(place, "whole", place / "packed", "--checkpoint-every", 2, steps=4))
    shutil.copytree(place / "whole", place / "damaged")
    damage(checkpoint_path(place / "damaged", 4) / "stage-000/exp_avg/model.safetensors")
    shutil.copytree(checkpoint_path(place / "whole", 2), checkpoint_path(place / "launched", 2))
    (place / "blocked").mkdir()
    for step in (1, 2):
        checkpoint_path(place / "blocked", step).touch()
    going_on = ("--resume", "auto", "--checkpoint-every", 2, "--keep", 1)
    run_jobs(
        place,
        job(place, "damaged", place / "packed", *going_on, "--save", place / "final", steps=8),
        job(place, "launched", checkpoint_path(place / "launched", 2), *going_on, steps=8),
        job(place, "blocked", place / "packed", "--checkpoint-every", 1, "--checkpoint-sync", steps=2),
    )
    return place


def job(place: Path, name: str, root: Path, *args: object, steps: int) -> dict[str, object]:
    fixed = (
        "--data", "synthetic", "--seq-len", 16, "--global-batch", 2, "--checkpoint", place / name, "--steps", steps,
        "--log-dir", place / f"{name}-log",
    )  # fmt: skip
    return {"root": str(root), "args": [str(arg) for arg in (*fixed, *args)], "log": str(place / f"{name}.log")}


def run_jobs(place: Path, *jobs: dict[str, object]) -> None:
    (place / "jobs.json").write_text(json.dumps(jobs))
    launch(1, "resume_worker.py", place / "jobs.json")


def damage(shard: Path) -> None:
    """Flip a bit of the last tensor."""
    data = bytearray(shard.read_bytes())
    data[-9] ^= 4
    shard.write_bytes(data)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_attempt_that_was_passed_over_leaves_nothing_in_memory(place: Path) -> None:
    said = (place / "damaged.log").read_text()
    assert f"warning: {checkpoint_path(place / 'damaged', 4)} cannot be resumed: " in said
    # The weights of the damaged one, whose moments cannot be read; then of the one before, and its moments.
    assert [line for line in said.splitlines() if "in memory" in line] == 2 * ["1 stages in memory"]


def test_trained_weights_are_saved_when_the_checkpoint_that_they_came_from_is_gone(place: Path) -> None:
    assert names_in(place / "damaged") == ["step-000008"]
    parents = [Path(parent.location) for parent in read_manifest(place / "final").parents]
    assert parents == [place / "packed", checkpoint_path(place / "damaged", 2)]


def test_checkpoint_that_is_launched_stays_whatever_keep_says(place: Path) -> None:
    assert "error:" not in (place / "launched.log").read_text()
    assert names_in(place / "launched") == ["step-000002", "step-000008"]


def test_run_whose_last_save_fails_has_failed(place: Path) -> None:
    last = checkpoint_path(place / "blocked", 2)
    where = f"rank 0: {last}"
    assert f" at {where}\n" in (place / "blocked.log").read_text()
    lines = map(json.loads, (place / "blocked-log" / "metrics.jsonl").read_text().splitlines())
    failed = {line["step"]: line["save_error"] for line in lines if "save_error" in line}
    assert list(failed) == [1, 2]
    assert failed[2].startswith(where)
