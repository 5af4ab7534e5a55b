"""Parts and their commit on Slurm, told to other programs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import reshard, write_model

ROOT = Path(__file__).resolve().parents[3]
ASKED = ("--layout", "pp=2", "--parts", "3", "--scheduler", "slurm", "--account", "us", "--time", "1:00:00")
OPTIONS = ("--account=us", "--time=1:00:00")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_model(tmp_path / "source")
    return tmp_path / "source"


def test_dry_run_gives_commands_and_scripts_as_one_object(source: Path, tmp_path: Path) -> None:
    pack = ("pack", source, "--out", tmp_path / "out", *ASKED, "--dry-run")
    text, told = reshard(*pack).out, reshard(*pack, "--json").json
    assert set(told) == {"version", "num_parts", "parts", "commit"}
    assert (told["version"], told["num_parts"]) == (1, 3)
    # On the command line, too: over the script's own options the environment's would win.
    assert told["parts"]["command"] == ["sbatch", "--parsable", *OPTIONS]
    assert told["commit"]["command"] == ["sbatch", "--parsable", *OPTIONS, "--dependency=afterok:ARRAY_JOB_ID"]
    again = told["parts"]["script"].replace(" --json --part", " --part")
    commands = [" ".join(told[job]["command"]) for job in ("parts", "commit")]
    assert f"$ {commands[0]}\n{again}\n$ {commands[1]}\n{told['commit']['script']}" == text


def test_submission_gives_the_numbers_of_both_jobs_as_one_object(source: Path, tmp_path: Path) -> None:
    """Another program stands for sbatch: it numbers what it is given, and keeps it."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\ncat > "{tmp_path}/$#.sh"\necho "1$#;cluster"\n')
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-m", "reshard", "pack", str(source), "--out", str(tmp_path / "out"), *ASKED]
    environment = {**os.environ, "PATH": f"{sbatch.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, "--json"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == {"version": 1, "num_parts": 3, "parts": {"job": "13"}, "commit": {"job": "14"}}
    assert "#SBATCH --array=1-3\n" in (tmp_path / "3.sh").read_text()
    assert "-m reshard commit" in (tmp_path / "4.sh").read_text()
