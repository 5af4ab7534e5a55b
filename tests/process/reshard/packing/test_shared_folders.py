"""Packs of several machines to one folder that they share: one of them writes it, and the others are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import llama_config, random_tensors, reshard, write_model

ROOT = Path(__file__).resolve().parents[4]
# A flock on a folder of NFS does not leave the machine; what the disk here is called then is NFS.
ON_NFS = """
import fcntl, os, stat, sys, time
from stores.folders import lock
flock = fcntl.flock
fcntl.flock = lambda file, how: None if stat.S_ISDIR(os.fstat(file).st_mode) else flock(file, how)
lock._SHARED = {line.split(" - ")[1].split()[0] for line in open("/proc/self/mountinfo")}
"""
PACK = """
import reshard
from manifests.errors import UserError

def pause(done: int, total: int) -> None:
    global pause_at
    if done and pause_at:
        pause_at = False
        print("writes", flush=True)
        sys.stdin.readline()

pause_at = True
try:
    reshard.pack(sys.argv[1], sys.argv[2], "pp=2", progress=pause)
    print("done", flush=True)
except UserError as error:
    print(error.code, flush=True)
"""
# The disk was not reached for so long that another machine has taken the place over.
TAKEN_OVER = """
from pathlib import Path
acquire = lock._acquire

def acquire_twice(path, claimant, *rest):
    file = acquire(path, claimant, *rest)
    path.unlink()
    lock._write(os.open(path, os.O_RDWR | os.O_CREAT), lock._Owner(host="elsewhere"))
    return file

lock._acquire = acquire_twice
"""


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two models of one shape."""
    config = llama_config()
    folders = tmp_path / "first", tmp_path / "second"
    for seed, folder in enumerate(folders):
        write_model(folder, config, random_tensors(config, seed=seed))
    return folders


def packing(source: Path, out: Path, before: str = ON_NFS) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", before + PACK, source, out], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_packs_of_two_machines_to_one_folder_are_not_mixed(models: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with packing(models[0], out) as first:
        assert answer(first) == "writes"
        with packing(models[1], out) as second:
            assert answer(second) == "launch.folder-in-use"
            second.communicate("\n")
        assert first.communicate("\n")[0] == "done\n"
    assert reshard("verify", out).code == 0
    assert reshard("diff", models[0], out).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "out", "second"]


def test_pack_whose_place_another_machine_has_taken_over_is_not_committed(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    with packing(models[0], tmp_path / "out", ON_NFS + TAKEN_OVER) as first:
        assert answer(first) == "writes"
        assert first.communicate("\n")[0] == "launch.folder-in-use\n"
    assert not (tmp_path / "out").exists()
