"""Law 3 for training checkpoints offline: whatever happens to a reshard or an export, its source stays good."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from blake3 import blake3

from tests.builders import refusal
from tests.fast.sliced import CUTS, cut_up
from tests.fast.trained import write_trained

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[4]
COMMIT_S = 0.02  # part of the time between the last file and the end of the process
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096}


@dataclass(frozen=True, slots=True)
class Verb:
    """A command on one of the checkpoints, and the file that it writes last."""

    source: str
    args: tuple[str, ...]
    last: str


VERBS: Mapping[str, Verb] = {
    "pack": Verb("trained", ("pack", "--layout", "pp=4"), "manifest.json"),
    "pack merged": Verb("sliced", ("pack", "--layout", "pp=1", "--merge-slices"), "manifest.json"),
    "export": Verb("trained", ("export", "--to", "hf"), "config.json"),
    "export cast": Verb("sliced", ("export", "--to", "hf", "--dtype", "bf16"), "config.json"),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tied checkpoint of 58 MB with its moments, and the same one in slices."""
    folder = tmp_path_factory.mktemp("killed")
    trained = write_trained(folder, "pp=2", tie_word_embeddings=True, **SIZES)
    shutil.copytree(trained, folder / "sliced")
    cut_up(folder / "sliced", CUTS["both"])
    return folder


@pytest.fixture(scope="module")
def expected(checkpoints: Path) -> Mapping[str, tuple[float, Mapping[str, str]]]:
    """Return for each command how long it takes undisturbed, and the digest of every file that it writes."""
    found = {}
    for name, verb in VERBS.items():
        began_s = time.perf_counter()
        assert start(verb, checkpoints, checkpoints / "whole").wait(60) == 0
        found[name] = (time.perf_counter() - began_s, digests_in(checkpoints / "whole"))
        shutil.rmtree(checkpoints / "whole")
    return found


def command_of(verb: Verb, checkpoints: Path, out: Path) -> Sequence[str | Path]:
    name, *args = verb.args
    return [sys.executable, "-m", "reshard", name, checkpoints / verb.source, *args, "--out", out]


def start(verb: Verb, checkpoints: Path, out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command_of(verb, checkpoints, out), cwd=ROOT, stdout=subprocess.DEVNULL)


def digests_in(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): blake3(path.read_bytes()).hexdigest() for path in paths}


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None and not path.exists():
        time.sleep(0.0005)


def kill(process: subprocess.Popen[bytes], partial: Path, last: str, takes_s: float, chance: random.Random) -> None:
    """Kill a process somewhere on its way or, as often, around its commit."""
    if chance.random() < 0.5:
        wait_for(partial, process)
        time.sleep(chance.uniform(0, 0.7 * takes_s))
    else:
        wait_for(partial / last, process)
        time.sleep(chance.uniform(0, COMMIT_S))
    process.kill()
    process.wait(60)


@pytest.mark.parametrize("num_kills", [2, pytest.param(35, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("name", VERBS)
def test_killed_command_leaves_its_source_and_nothing_half_done_and_the_next_one_is_whole(
    name: str,
    num_kills: int,
    checkpoints: Path,
    expected: Mapping[str, tuple[float, Mapping[str, str]]],
    tmp_path: Path,
) -> None:
    verb, (takes_s, whole), chance = VERBS[name], expected[name], random.Random(f"{name} {num_kills}")
    out, before = tmp_path / "out", digests_in(checkpoints / verb.source)
    record = {".out.exported.json"} if name.startswith("export") else set()  # of an export that was committed
    unfinished = {".out.partial", *(f".{path}.partial" for path in record)}
    for _ in range(num_kills):  # each one begins with what the one before it left
        kill(start(verb, checkpoints, out), tmp_path / ".out.partial", verb.last, takes_s, chance)
        assert {path.name for path in tmp_path.iterdir()} <= {"out", *unfinished, *record}
        if out.exists():
            assert digests_in(out) == whole
            shutil.rmtree(out)
    assert start(verb, checkpoints, out).wait(60) == 0
    assert digests_in(out) == whole
    assert {path.name for path in tmp_path.iterdir()} == {"out", *record}
    assert digests_in(checkpoints / verb.source) == before


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["pack merged", "export cast"])
def test_command_on_a_disk_that_is_full_or_fails_is_right_or_refused(
    name: str,
    seed: int,
    checkpoints: Path,
    expected: Mapping[str, tuple[float, Mapping[str, str]]],
    tmp_path: Path,
) -> None:
    paths = os.pathsep.join((str(ROOT / "tests/process/faulty"), str(ROOT)))
    done = subprocess.run(
        command_of(VERBS[name], checkpoints, tmp_path / "out"),
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "FAULTS": str(seed)}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    if done.returncode == 0:
        assert digests_in(tmp_path / "out") == expected[name][1]
    else:
        assert (done.returncode, done.stderr[:7], list(tmp_path.iterdir())) == (3, "error: ", [])


@pytest.mark.parametrize("name", VERBS)
def test_place_that_takes_no_files_is_named(name: str, checkpoints: Path) -> None:
    verb, *args = map(str, command_of(VERBS[name], checkpoints, Path("/proc/out"))[3:])
    assert refusal(verb, *args).found == (3, "output.unwritable", "/proc/out")
