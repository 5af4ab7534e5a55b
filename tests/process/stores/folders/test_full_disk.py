"""A disk that is full, or fills up meanwhile: one error with bytes needed and free, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import llama_config, pack, random_tensors, refusal, reshard, write_model

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a full disk. Only root can mount a small one")

ROOT = Path(__file__).resolve().parents[4]
DISK_NBYTES = 32 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write and pack a model of 28 MB, which the small disk holds once, and not twice."""
    folder = tmp_path_factory.mktemp("full")
    config = llama_config(hidden_size=512, intermediate_size=2048, num_hidden_layers=3, vocab_size=2048)
    write_model(folder / "source", config, num_shards=2)
    pack(folder / "source", folder / "packed")
    return folder / "source"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip(f"NOT TESTED: a full disk. This root may not mount: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def verbs(source: Path) -> dict[str, tuple[str | Path, ...]]:
    return {
        "pack": ("pack", source, "--layout", "pp=2"),
        "repack": ("pack", source.with_name("packed"), "--layout", "pp=3"),
        "export": ("export", source.with_name("packed"), "--to", "hf"),
    }


@pytest.mark.parametrize("verb", ["pack", "repack", "export"])
def test_full_disk_is_refused_before_a_tensor_moves(verb: str, source: Path, disk: Path) -> None:
    (disk / "ballast").write_bytes(bytes(DISK_NBYTES // 2))
    began_s = time.process_time()
    refused = refusal(*verbs(source)[verb], "--out", disk / "out")
    assert refused.found == (3, "output.disk-full", str(disk))
    free, needed = (float(size) * 2**20 for size in re.findall(r"([\d.]+) MiB", refused.text))
    assert 27e6 < needed < 30e6
    assert 0.9 * DISK_NBYTES / 2 < free <= 1.001 * DISK_NBYTES / 2
    assert [path.name for path in disk.iterdir()] == ["ballast"]
    assert time.process_time() - began_s < 5


@pytest.mark.parametrize("verb", ["pack", "repack", "export"])
def test_disk_that_has_room_is_enough(verb: str, source: Path, disk: Path) -> None:
    ended = reshard(*verbs(source)[verb], "--out", disk / "out")
    assert (ended.code, ended.err) == (0, "")
    record = [".out.exported.json"] if verb == "export" else []
    assert sorted(path.name for path in disk.iterdir()) == [*record, "out"]


@pytest.mark.parametrize("verb", ["pack", pytest.param("repack", marks=pytest.mark.slow), "export"])
def test_disk_that_another_process_fills_meanwhile_is_one_error(verb: str, source: Path, disk: Path) -> None:
    """Somebody else takes the room as soon as the work has begun, and gives it back at the end."""
    command = ["nice", "-n", "19", sys.executable, "-m", "reshard", *verbs(source)[verb], "--out", disk / "out"]
    command += ["--quiet", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    filler = threading.Thread(target=fill, args=(disk, process))
    filler.start()
    output, _ = process.communicate(timeout=60)
    filler.join()
    error = json.loads(output)["error"]
    assert (process.returncode, error["code"]) == (3, "output.disk-full"), output
    assert error["where"].startswith(str(disk))
    assert {path.name for path in disk.iterdir()} <= {"ballast", ".out.partial"}  # of what was verified, if anything
    assert (".out.partial" in error["hint"]) == (disk / ".out.partial").exists()
    (disk / "ballast").unlink()
    assert reshard(*verbs(source)[verb], "--out", disk / "out").code == 0


def test_temporary_folder_that_is_full_is_one_error(
    source: Path, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The differences to a chain at an address are collected there."""
    chain = f"file://{tmp_path / 'chain'}"
    (tmp_path / "chain").mkdir()
    assert reshard("delta", "publish", source, "--chain", chain).code == 0
    config = json.loads((source / "config.json").read_text())
    write_model(tmp_path / "next", config, random_tensors(config, seed=1), num_shards=2)
    (disk / "ballast").write_bytes(bytes(DISK_NBYTES * 3 // 4))
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    refused = refusal("delta", "publish", tmp_path / "next", "--chain", chain)
    assert refused.found == (3, "output.disk-full", "TMPDIR")
    assert [path.name for path in disk.iterdir()] == ["ballast"]
    assert [path.name for path in (tmp_path / "chain").iterdir()] == ["weight_v000001"]


def fill(disk: Path, process: subprocess.Popen[str]) -> None:
    """Write until nothing fits, once a work folder has its first shard."""
    while process.poll() is None and not any(disk.glob(".out.partial/**/*.safetensors")):
        time.sleep(0.0005)
    process.send_signal(signal.SIGSTOP)
    with open(disk / "ballast", "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 20))
            except OSError:
                break
    process.send_signal(signal.SIGCONT)
