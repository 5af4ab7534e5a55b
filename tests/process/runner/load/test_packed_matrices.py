"""`load_stages` and `save_stages` of DTensors in which a rank has rows of each of several packed matrices."""

from __future__ import annotations

from pathlib import Path

import reshard
from tests.builders import run
from tests.fast.runner.tiny import save_model
from tests.process.torchrun import launch


def test_rows_of_each_packed_matrix_are_loaded_and_saved(tmp_path: Path) -> None:
    save_model(tmp_path / "model", num_hidden_layers=1, intermediate_size=18)
    reshard.pack(tmp_path / "model", tmp_path / "packed", "pp=1")
    launch(4, "runner/load/packed_matrices_worker.py", tmp_path / "model", tmp_path / "packed", tmp_path)
    for name in ("named", "adapted"):
        run("verify", tmp_path / name, "--against", tmp_path / "model")
