"""On a disk that reads short, writes short and fails, a pack is right or is refused; never committed wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import llama_config, write_model

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[4]


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


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 24), marks=pytest.mark.slow)], ids=str)
def test_pack_on_a_failing_disk_is_right_or_refused(source: Path, whole: Path, tmp_path: Path, seeds: range) -> None:
    codes, command = set(), ("pack", source, "--layout", "pp=4", "--out")
    for seed in seeds:
        place = tmp_path / str(seed)
        place.mkdir()
        done = reshard(*command, place / "out", faults=seed)
        codes.add(done.returncode)
        assert "Traceback" not in done.stderr
        if done.returncode:
            assert done.stderr.startswith("error: ")
            assert set(place.iterdir()) <= {place / ".out.partial"}  # what was verified stays, for the same command
            assert reshard(*command, place / "out").returncode == 0
        assert subprocess.run(["diff", "-r", str(whole), str(place / "out")]).returncode == 0
    assert codes == {0, 3}


@pytest.mark.parametrize("seeds", [range(100, 103), pytest.param(range(103, 112), marks=pytest.mark.slow)], ids=str)
def test_export_on_a_failing_disk_is_the_source_or_refused(
    source: Path, whole: Path, tmp_path: Path, seeds: range
) -> None:
    command = ("export", whole, "--to", "hf", "--out")
    for seed in seeds:
        place = tmp_path / str(seed)
        place.mkdir()
        done = reshard(*command, place / "back", faults=seed)
        assert "Traceback" not in done.stderr
        if done.returncode:
            assert done.returncode == 3
            assert set(place.iterdir()) <= {place / ".back.partial"}
            assert reshard(*command, place / "back").returncode == 0
        assert subprocess.run(["diff", "-r", str(source), str(place / "back")]).returncode == 0
