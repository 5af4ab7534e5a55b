"""Outputs at mount points, to which nothing can be renamed, are refused; their subfolders are not."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import files_in, llama_config, reshard, run, write_model

ROOT = Path(__file__).resolve().parents[4]


def mount(*args: object) -> bool:
    return subprocess.run(["mount", *map(str, args)], capture_output=True, timeout=20).returncode == 0


@pytest.fixture(params=["disk", "folder of the same disk"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount an empty disk, as a volume claim or a scratch disk is."""
    above, out = tmp_path / "above", tmp_path / "above/out"
    above.mkdir()
    mounted = [out]
    try:
        if request.param == "folder of the same disk":
            out.mkdir()
            (tmp_path / "volume").mkdir()
            done = mount("--bind", tmp_path / "volume", out)
        else:
            mounted.append(above)
            done = mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", above)
            out.mkdir()
            done = done and mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", out)
        if not done:
            warnings.warn("no right to mount: outputs in mount points are not tested here", UserWarning, stacklevel=1)
            pytest.skip("no right to mount")
        yield out
    finally:
        for folder in mounted:
            subprocess.run(["umount", str(folder)], capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of 12 MB, more than the disk above the mount point takes, and its bundles."""
    place = tmp_path_factory.mktemp("mounts")
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096}
    write_model(place / "source", llama_config(**sizes), num_shards=2)
    assert reshard("pack", place / "source", "--layout", "pp=2", "--out", place / "packed").code == 0
    return place


def test_output_at_a_mount_point_is_refused_before_a_byte_is_read(place: Path, out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    before = sorted(out.parent.iterdir())
    pack = ("pack", place / "source", "--layout", "pp=2", "--out")
    for command in (
        (*pack, out), (*pack, out, "--force"), (*pack, out, "--part", "1/2"),
        ("export", place / "packed", "--to", "hf", "--out", out),
    ):  # fmt: skip
        refused = reshard(*command, "--json")
        assert (refused.code, refused.json["error"]["code"]) == (3, "output.mount-point")
        assert str(out / "packed") in refused.json["error"]["hint"]
    assert files_in(out) == {"notes.txt": b"mine"}
    assert sorted(out.parent.iterdir()) == before
    run(*pack, out / "packed")
    assert files_in(out / "packed") == files_in(place / "packed")


def test_run_that_would_save_to_a_mount_point_is_refused_before_its_first_step(place: Path, out: Path) -> None:
    command = ("-m", "runner", "launch", place / "packed", "--nproc-per-node", 2, "--", "--data", "synthetic")
    ended = subprocess.run(
        [sys.executable, *map(str, command), "--steps", "1", "--save", str(out), "--log-dir", str(place / "log")],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 3, ended.stderr
    assert "[output.mount-point]" in ended.stderr
