"""Outputs in mount points: every byte goes to the disk that is mounted there, and a kill leaves no half of one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from manifests.fixed import is_fixed
from tests.builders import files_in, llama_config, reshard, run, write_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("reshard.cli.pack", "reshard.sources.open", "reshard.operations.divide", "reshard.operations.pack")
IMPORTS = f"import {', '.join(MODULES)}; reshard.operations.pack.version('reshard')"


def mount(*args: object) -> bool:
    return subprocess.run(["mount", *map(str, args)], capture_output=True, timeout=20).returncode == 0


@pytest.fixture(params=["disk", "disk in a read-only folder", "folder of the same disk"])
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
            if request.param == "disk in a read-only folder":
                done = done and mount("-o", "remount,ro", above)
        if not done:
            warnings.warn("no right to mount: outputs in mount points are not tested here", UserWarning, stacklevel=1)
            pytest.skip("no right to mount")
        (out / "lost+found").mkdir()
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


def settled(out: Path) -> dict[str, bytes]:
    """Give the files of an output, and see that nothing else is left there."""
    assert (out / "lost+found").is_dir()
    assert [name for name in os.listdir(out) if name.startswith(".")] == []
    return files_in(out)


def test_pack_and_export_into_a_mount_point(place: Path, out: Path) -> None:
    assert is_fixed(out)
    run("pack", place / "source", "--layout", "pp=2", "--out", out)
    assert settled(out) == files_in(place / "packed")
    assert reshard("verify", out).code == 0
    before = files_in(out)
    for flags, code in (((), "output.exists"), (("--force",), "output.cannot-replace")):
        again = reshard("pack", place / "source", "--layout", "pp=4", "--out", out, "--json", *flags)
        assert (again.code, again.json["error"]["code"]) == (3, code)
    assert files_in(out) == before
    for name in os.listdir(out):
        shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink()
    (out / "lost+found").mkdir()
    run("export", place / "packed", "--to", "hf", "--out", out)
    assert settled(out) == files_in(place / "source")


def test_pack_in_parts_into_a_mount_point(place: Path, out: Path) -> None:
    for part in ("1/2", "2/2"):
        run("pack", place / "source", "--layout", "pp=2", "--out", out, "--part", part)
    for _ in range(2):
        run("commit", out)
    assert settled(out) == files_in(place / "packed")


def test_files_of_others_in_a_mount_point_are_not_written_among(place: Path, out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    for flags in ((), ("--force",)):
        packed = reshard("pack", place / "source", "--layout", "pp=2", "--out", out, "--json", *flags)
        assert packed.code == 3
    assert files_in(out) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("at", [3, *(pytest.param(at, marks=pytest.mark.slow) for at in (0, 6, 9))])
def test_pack_into_a_mount_point_killed_while_it_commits_is_done_again(place: Path, out: Path, at: int) -> None:
    """Kill it at its `at`th rename, of those that move the output's entries up."""
    code = (
        "import os, signal, sys\n"
        "from manifests import fixed\n"
        "rename, left = os.rename, [int(sys.argv.pop(1))]\n"
        "def counted(old, new):\n"
        "    left[0] -= 1\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if left[0] < 0 else rename(old, new)\n"
        "fixed.os.rename = counted\n"
        "from reshard.cli import main; main()\n"
    )
    command = ["pack", place / "source", "--layout", "pp=2", "--out", out]
    killed = subprocess.run(
        [sys.executable, "-c", code, str(at), *map(str, command)], cwd=ROOT, capture_output=True, timeout=100
    )
    if killed.returncode == 0:  # it has no more renames
        assert settled(out) == files_in(place / "packed")
        return
    assert killed.returncode == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    assert reshard("verify", out).code == 3
    run(*command)
    assert settled(out) == files_in(place / "packed")


def test_folder_whose_parent_cannot_be_written_is_filled(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root runs commands as somebody else")
    above = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        shutil.copytree(place / "source", above / "source")
        (above / "out").mkdir()
        for path, mode in ((above, 0o755), (above / "out", 0o777), (above / "source", 0o755)):
            path.chmod(mode)
        command = ["pack", above / "source", "--layout", "pp=2", "--out", above / "out", "--json"]
        code = "import os; os.setgid(65534); os.setuid(65534)\nfrom reshard.cli import main; main()"
        # What this user may not read of the interpreter is imported before.
        ended = subprocess.run(
            [sys.executable, "-c", f"{IMPORTS}; {code}", *map(str, command)],
            cwd=ROOT, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr + ended.stdout
        assert json.loads(ended.stdout)["version"] == 1
        found, expected = files_in(above / "out"), files_in(place / "packed")
        assert found.keys() == expected.keys()
        assert {name for name in found if found[name] != expected[name]} == {"manifest.json"}  # it names its source
        assert sorted(path.name for path in above.iterdir()) == ["out", "source"]
    finally:
        shutil.rmtree(above)
