"""The commands of docs/start.md and docs/checkpoints.md, run in order as a reader would, on the demo's small model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"(?:^    .*\n)+", re.MULTILINE)


def run_page(name: str, folder: Path) -> None:
    """Run a page's indented blocks, but for the installation."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    for block in _BLOCK.findall((ROOT / "docs" / name).read_text()):
        if "pip install" not in block:
            ended = subprocess.run(
                ["bash", "-euc", block], cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
                check=False,
            )  # fmt: skip
            assert ended.returncode == 0, f"{block}\n{ended.stdout}\n{ended.stderr}"


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """Return a folder with what the pages assume: a model and a folder of text."""
    subprocess.run([sys.executable, ROOT / "demo" / "make_model.py", tmp_path], check=True, timeout=120)
    (tmp_path / "model").rename(tmp_path / "Llama-3.2-1B")
    return tmp_path


def test_ten_minutes(reader: Path) -> None:
    run_page("start.md", reader)
    for trained in ("trained", "Llama-trained"):
        AutoModelForCausalLM.from_pretrained(reader / trained)
    assert (reader / "report.html").stat().st_size > 10_000


def test_checkpoints_and_other_degrees(reader: Path) -> None:
    subprocess.run(
        [Path(sys.executable).parent / "reshard", "pack", "Llama-3.2-1B", "--layout", "pp=2", "--out", "pp2"],
        cwd=reader, check=True, timeout=60,
    )  # fmt: skip
    run_page("checkpoints.md", reader)
    AutoModelForCausalLM.from_pretrained(reader / "hf")
