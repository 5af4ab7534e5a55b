"""The steps for CI of docs/check.md and the hook of .pre-commit-hooks.yaml pass healthy checkpoints and stop others."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import llama_config, reshard, write_model
from tests.fast.reshard.checks.test_check import healthy_tensors

ROOT = Path(__file__).parents[2]
PRE_COMMIT = (sys.executable, "-m", "pre_commit")
SHARD = "model-00002-of-00003.safetensors"


def shown() -> list[Any]:
    """Return what the page shows as YAML: the steps of a workflow, and a config of pre-commit."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "check.md").read_text(), re.DOTALL)
    return [yaml.safe_load(block) for block in blocks]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command where `reshard` is this one, and git and pre-commit know no settings of this machine."""
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    git = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "PRE_COMMIT_HOME": str(folder / "home")}
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **here, **git}, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a git repository that tracks a healthy checkpoint and its digests."""
    write_model(tmp_path / "checkpoint", llama_config(), healthy_tensors(), num_shards=3)
    assert reshard("check", tmp_path / "checkpoint", "--digests", "write").code == 0
    assert run(tmp_path, "git", "init", "-q").returncode == 0
    return tmp_path


def check_with(repository: Path, config: object) -> subprocess.CompletedProcess[str]:
    (repository / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    assert run(repository, "git", "add", ".pre-commit-config.yaml", "checkpoint").returncode == 0
    return run(repository, *PRE_COMMIT, "run", "--all-files", "--verbose")


def own_hook() -> dict[str, Any]:
    """Return the config of the hook as this repository offers it, run without installing anything."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    arguments = ["./checkpoint", "--digests", "verify"]
    return {"repos": [{"repo": "local", "hooks": [{**hook, "language": "system", "args": arguments}]}]}


@pytest.mark.parametrize("config", [shown()[1], own_hook()], ids=["docs", "own"])
def test_hook_lets_a_healthy_checkpoint_pass_and_stops_another(config: object, repository: Path) -> None:
    healthy = check_with(repository, config)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "ok: " in healthy.stdout
    (repository / "checkpoint" / SHARD).unlink()
    broken = check_with(repository, config)
    assert broken.returncode == 1
    assert "- exit code: 4" in broken.stdout
    assert "check.missing-shard" in broken.stdout


def test_hooks_of_this_repository_are_valid(tmp_path: Path) -> None:
    done = run(tmp_path, *PRE_COMMIT, "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_step_of_the_workflow_fails_where_a_shard_is_missing(repository: Path) -> None:
    command = shown()[0][-1]["run"]
    shutil.rmtree(repository / ".git")
    assert run(repository, "bash", "-ec", command).returncode == 0
    (repository / "checkpoint" / SHARD).unlink()
    done = run(repository, "bash", "-ec", command)
    assert done.returncode == 4
    assert done.stdout.splitlines()[-1].startswith("FAILED: ./checkpoint: ")
