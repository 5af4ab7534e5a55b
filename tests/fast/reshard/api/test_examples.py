"""The example scripts run as their first lines say. Two of them start ranks: see `tests/process`."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import files_in
from tests.fast.runner.tiny import save_model
from tools import api

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    save_model(folder / "model")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what runs a script, and returns what it prints."""

    def run(script: str, *arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_run_by_a_test_and_told_in_the_page() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    started = ("save_stages_worker.py", "models/test_own_models.py", "models/titan_worker.py")
    tests = Path(__file__).read_text() + "".join(
        (ROOT / "tests" / "process" / "runner" / name).read_text() for name in started
    )
    page = api.render()
    for script in scripts:
        named = (
            f'"{script}"',
            f'examples/{script}"',
            f"from examples.{script.removesuffix('.py')} import",
            f"from {script.removesuffix('.py')} import",
        )
        assert any(name in tests for name in named), script
        assert f"examples/{script}" in page


def test_examples_pack_reshard_export_load_and_plot(folder: Path, run: Callable[..., str]) -> None:
    out = folder / "out"
    said = run("pack.py", folder / "model", out)
    assert "75 tensors are equal, 47 on another stage" in said
    assert files_in(out / "hf") == files_in(folder / "model")
    manifest = json.loads((out / "pp2" / "manifest.json").read_text())
    assert [f"({rank},): {stage['num_tensors']} tensors" in run("load_stage.py", out / "pp2", "--rank", str(rank))
            for rank, stage in enumerate(manifest["stages"])] == [True, True]  # fmt: skip
    said = run("inspect_and_plot.py", out / "pp2", folder / "stages.svg")
    assert all(f"stage {stage['index']}: {stage['num_tensors']} tensors" in said for stage in manifest["stages"])
    assert (folder / "stages.svg").read_text().startswith("<?xml")
