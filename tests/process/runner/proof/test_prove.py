"""`runner prove MANIFEST`: a run's combination on this machine, whole, or in subsets of its degrees."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import current_process
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result

from manifests.errors import UserError
from manifests.optimizer_groups import algorithm_of
from runner.bundle.packed import open_packed
from runner.commands import cli
from runner.config.flags import parse_training
from runner.config.parallel_dims import ParallelDims
from runner.proof import alone
from runner.proof.alone import Request, combination_of
from tests.builders import pack
from tests.fast.manifests.models.built import build, perturb, read_config
from tests.fast.manifests.models.catalogued import save_tiny
from tests.process.torchrun import fork_context

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prove")
    perturb(build(read_config("tiny-qwen3-moe"))).save_pretrained(folder / "model")
    return pack(folder / "model", folder / "packed", "pp=2")


def prove(*arguments: object) -> Result:
    fork_context()  # whose process has imported what ranks need
    return CliRunner().invoke(cli, ["prove", *map(str, arguments)])


def test_a_combination_of_64_ranks_is_proven_on_4(packed: Path) -> None:
    flags = ("--dp-shard", 8, "--ep", 8, "--global-batch", 64, "--ac", "full")  # 4 replicas
    done = prove(packed, "--nnodes", 8, "--nproc-per-node", 8, "--json", "--", *flags)
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)
    document: dict[str, Any] = json.loads(done.stdout)
    assert (document["version"], document["equal"], document["degrees"]["shard"]) == (1, True, 8)
    (tried,) = document["tried"]
    assert (tried["schedule"], tried["dtype"], tried["problem"]) == ("1F1B", "fp64", None)
    assert {name: degree for name, degree in tried["degrees"].items() if degree > 1} == {
        "pipeline": 2, "replicate": 2, "shard": 2, "expert": 2,
    }  # fmt: skip
    assert max(tried["differences"].values()) <= 1e-10


@pytest.mark.parametrize(
    ("flags", "shown"),
    [(("--data=absent.jsonl",), ""), (("--document-mask",), " --document-mask"),
     (("--tokenized", "--token-weights", "weight"), " --loss")],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_data_is_not_read_however_its_flags_are_written(packed: Path, flags: tuple[str, ...], shown: str) -> None:
    done = prove(packed, "--nproc-per-node", 2, "--json", "--", *flags, "--global-batch", 4)
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)
    (tried,) = json.loads(done.stdout)["tried"]
    assert tried["options"] == f"--dtype fp32{shown}"


def test_the_optimizer_of_the_run_is_proven(packed: Path) -> None:
    options = parse_training(("--data", "synthetic", "--optimizer", "muon"))
    run = combination_of(Request(launched=open_packed(packed), options=options, degrees=ParallelDims(pipeline=2)))
    plan = run.options.optim.plan
    assert plan is not None
    assert {algorithm_of(group, plan.name) for group in plan.groups} == {"Muon", "AdamW"}


def test_flags_that_a_checkpoint_would_recall_have_their_defaults(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = list[Request]()
    monkeypatch.setattr(alone, "try_here", lambda request: requests.append(request) or ())
    prove(packed, "--nproc-per-node", 4, "--json", "--", "--dp-shard", 2, "--resume", "auto", "--checkpoint", "none")
    assert [request.options.batch.num_microbatches for request in requests] == [8]


def test_a_machine_where_no_temporary_folder_can_be_made_is_refused(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_context()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    error = prove(packed).exception
    assert isinstance(error, UserError)
    assert (error.code, error.where) == ("output.unwritable", "TMPDIR")


def test_a_machine_without_a_short_temporary_path_is_refused(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_context()
    (long := tmp_path / ("long" * 20)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.delitem(current_process()._config, "tempdir", raising=False)  # type: ignore[attr-defined]

    def mkdtemp(prefix: str) -> str:
        assert tempfile.tempdir == "/tmp", "the socket's path has a limit"
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"/tmp/{prefix}")

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    error = prove(packed).exception
    assert isinstance(error, UserError)
    assert (error.code, error.where) == ("output.unwritable", "/tmp/pymp-")


@pytest.mark.slow
def test_new_weights_are_proven_with_the_rate_of_their_launch(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "DeepseekV3ForCausalLM", num_hidden_layers=2)
    new = pack(tmp_path / "model" / "config.json", tmp_path / "new", "pp=1", "--init", "0")
    done = prove(new, "--nproc-per-node", 1, "--json")
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)
    (tried,) = json.loads(done.stdout)["tried"]
    assert "--router-bias-rate 0.001" in tried["options"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_ranks_end_with_a_command_that_is_killed(packed: Path) -> None:
    """One rank is stopped, and the other would wait for it."""
    name, value = "PROVE_TEST", uuid4().hex
    command = [sys.executable, "-m", "runner", "prove", str(packed), "--", "--global-batch", "64"]
    with subprocess.Popen(command, env={**os.environ, name: value}, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: len(ranks_of(processes_with(name, value))) == 2)
        stopped, _ = ranks_of(processes_with(name, value))
        os.kill(stopped, signal.SIGSTOP)
        process.kill()
    try:
        wait_for(lambda: ranks_of(processes_with(name, value)) == [stopped])
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: not processes_with(name, value))


def wait_for(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_with(name: str, value: str) -> dict[int, int]:
    """Return the fork server with this in its environment and its ranks, and the parent of each."""
    parents = dict[int, int]()
    for entry in (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
        with suppress(OSError):
            is_ours = f"{name}={value}\0".encode() in (entry / "environ").read_bytes()
            if is_ours and b"forkserver" in (entry / "cmdline").read_bytes():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


def ranks_of(parents: Mapping[int, int]) -> list[int]:
    return sorted(process for process, parent in parents.items() if parent in parents)
