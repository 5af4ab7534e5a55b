"""What a run will write, probed before its first step: full, small and read-only disks are refused, and left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.local_jobs import ROOT, SMALL, runner
from tests.process.torchrun import started

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="NOT TESTED: full and read-only disks. Only root can mount one"
)


@contextmanager
def mounted(folder: Path, nbytes: int = 1 << 20) -> Iterator[Path]:
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip(f"NOT TESTED: a small disk. This root may not mount: {mount.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk") as folder:
        yield folder


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


def fill(disk: Path) -> None:
    with open(disk / "ballast", "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError:
            return


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def launch(packed: Path, *training: str | Path) -> tuple[int, str]:
    done = runner("launch", packed, "--", *SMALL, "--steps", "2", *training)
    return done.returncode, done.stderr


@pytest.mark.parametrize("flag", ["--save", "--checkpoint", "--log-dir"])
def test_read_only_place_is_refused_by_its_flag_before_a_rank_starts(
    flag: str, packed: Path, disk: Path, tmp_path: Path
) -> None:
    (disk / "there").mkdir()
    make_read_only(disk)
    place = disk / "there" / "out" if flag == "--save" else disk / "there"
    log = () if flag == "--log-dir" else ("--log-dir", tmp_path / "log")
    code, said = launch(packed, flag, place, *log)
    assert code == 3, said
    assert said.startswith(f"error: {flag} {place}: "), said
    assert "Traceback" not in said
    assert names_in(disk) == ["there"]


def test_log_folder_on_a_full_disk_is_refused_and_nothing_is_left_there(packed: Path, disk: Path) -> None:
    fill(disk)
    code, said = launch(packed, "--log-dir", disk / "log")
    assert (code, said.startswith(f"error: --log-dir {disk / 'log'}: ")) == (3, True), said
    assert "Traceback" not in said
    assert names_in(disk) == ["ballast"]


def by_ranks(packed: Path, log: Path, *training: str | Path) -> tuple[list[int | None], str]:
    """Run two ranks, which no launcher has looked for; return their exit codes and what they print."""
    words = (packed / "manifest.json", *SMALL, "--steps", "2", "--log-dir", log, *training)
    with started(2, "../../runner/train.py", *words) as ranks:
        codes = [rank.wait(60) for rank in ranks]
        return codes, "".join(rank.said for rank in ranks)


@pytest.mark.parametrize(
    ("flag", "code"),
    [
        ("--checkpoint", "read-only"),
        pytest.param("--save", "read-only", marks=pytest.mark.slow),
        pytest.param("--checkpoint", "small", marks=pytest.mark.slow),
    ],
)
def test_ranks_refuse_what_they_cannot_write_before_the_first_step(
    flag: str, code: str, packed: Path, disk: Path, tmp_path: Path
) -> None:
    (disk / "there").mkdir()
    place = disk / "there" / "out" if flag == "--save" else disk / "there"
    if code == "read-only":
        make_read_only(disk)
    else:
        (disk / "ballast").write_bytes(bytes((1 << 20) - (1 << 15)))
    codes, said = by_ranks(packed, tmp_path / "log", flag, place)
    assert codes in ([3, 3], [3, 5]), said  # 5: it is rank 0 that cannot write
    assert "step 1/" not in said
    assert said.count(f"{flag} {place}: ") == 1, said
    assert not any(path.suffix == ".safetensors" for path in disk.rglob("*"))


@pytest.mark.parametrize("verb", ["verify", "diff", "check"])
def test_checkpoint_is_not_opened_where_its_report_is_on_a_full_disk(verb: str, disk: Path) -> None:
    (disk / "report").touch()
    fill(disk)
    absent = disk / "absent"  # which is not looked for
    words = [verb, absent, *([absent] if verb == "diff" else [])]
    with open(disk / "report", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "reshard", *map(str, words)], cwd=ROOT, stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr.startswith("error: standard output: ")) == (3, True), done.stderr


def test_answer_is_not_computed_where_its_file_is_on_a_full_disk(packed: Path, disk: Path) -> None:
    (disk / "answer").touch()
    fill(disk)
    command = [sys.executable, "-m", "runner.cli", "eval", packed, "--data", "a.txt"]
    with open(disk / "answer", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr.startswith("error: standard output: ")) == (3, True), done.stderr
