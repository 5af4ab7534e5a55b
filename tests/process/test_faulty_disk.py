"""On a disk that reads short, writes short and fails, a pack is right or is refused; never committed wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import llama_config, write_model

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
NORMAL = 8  # seeds of `make test`


def reshard(*arguments: str | Path, faults: int | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests/process/faulty"), str(ROOT)))
    if faults is not None:
        environment["FAULTS"] = str(faults)
    command = [sys.executable, "-m", "reshard", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faulty") / "source"
    config = llama_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=12, tie_word_embeddings=True)
    write_model(folder, config, num_shards=3)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    assert reshard("pack", source, "--layout", "pp=4", "--out", source.parent / "whole").returncode == 0
    return source.parent / "whole"


@pytest.mark.parametrize(
    "seed", [*range(NORMAL), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(NORMAL, 24))]
)
def test_pack_on_a_failing_disk_is_right_or_refused(source: Path, whole: Path, tmp_path: Path, seed: int) -> None:
    out = tmp_path / "out"
    done = reshard("pack", source, "--layout", "pp=4", "--out", out, faults=seed)
    assert "Traceback" not in done.stderr
    if done.returncode == 0:
        assert subprocess.run(["diff", "-r", str(whole), str(out)]).returncode == 0
        return
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    assert set(tmp_path.iterdir()) <= {tmp_path / ".out.partial"}  # what was verified stays, for the same command
    assert reshard("pack", source, "--layout", "pp=4", "--out", out).returncode == 0
    assert subprocess.run(["diff", "-r", str(whole), str(out)]).returncode == 0


@pytest.mark.parametrize(
    "seed", [*range(100, 106), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(106, 112))]
)
def test_export_on_a_failing_disk_is_the_source_or_refused(
    source: Path, whole: Path, tmp_path: Path, seed: int
) -> None:
    back = tmp_path / "back"
    done = reshard("export", whole, "--to", "hf", "--out", back, faults=seed)
    assert "Traceback" not in done.stderr
    if done.returncode != 0:
        assert done.returncode == 3
        assert set(tmp_path.iterdir()) <= {tmp_path / ".back.partial"}
        assert reshard("export", whole, "--to", "hf", "--out", back).returncode == 0
    assert subprocess.run(["diff", "-r", str(source), str(back)]).returncode == 0


def test_these_seeds_meet_both_ends(source: Path, tmp_path: Path) -> None:
    """The tests above say something only if some packs fail and some succeed."""
    codes = {
        reshard("pack", source, "--layout", "pp=4", "--out", tmp_path / str(seed), faults=seed).returncode
        for seed in range(NORMAL)
    }
    assert codes == {0, 3}
