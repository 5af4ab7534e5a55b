"""Folders probed before the work: what cannot be written is refused, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manifests.errors import InputError
from stores.folders.probe import check_new_file, check_room, check_writable, folder_of
from stores.folders.publish import exchange

ROOT = Path(__file__).parents[4]


def refuse(first: Path, second: Path) -> None:
    raise InputError(str(second), "cannot be replaced in one step here", "remove it", code="output.cannot-replace")


def test_probe_leaves_nothing_where_it_wrote(tmp_path: Path) -> None:
    check_writable(tmp_path / "not" / "yet", "--out", exchange=exchange)
    assert list(tmp_path.iterdir()) == []


def test_probe_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    killed = "import os; from stores.folders import probe; probe.write_file = lambda *_: os.kill(os.getpid(), 9)"
    code = f"{killed}; import pathlib; probe.check_writable(pathlib.Path({str(tmp_path)!r}), 'x')"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".probe-")
    for name in (".probe-notes", left.name.replace("-", "-f", 1)):  # a name that is not ours, another machine's
        (tmp_path / name).mkdir()
    check_writable(tmp_path, "x")
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_folder_below_a_file_is_refused_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as error:
        check_writable(tmp_path / "file" / "below", "--save x")
    assert (error.value.code, error.value.where) == ("output.unwritable", "--save x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere; process tests mount a read-only disk")
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o555)
    with pytest.raises(InputError) as error:
        check_writable(tmp_path / "theirs", "--checkpoint x")
    assert error.value.code == "output.unwritable"


def test_file_system_that_cannot_exchange_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        check_writable(tmp_path, "--save x", exchange=refuse)
    assert (error.value.code, error.value.where) == ("output.cannot-replace", "--save x")
    assert list(tmp_path.iterdir()) == []


def test_disk_with_too_little_room_for_all_together_is_refused(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    check_room([("--checkpoint x", tmp_path / "a", 1), ("--save x", tmp_path / "b", 1)])
    half = free // 2 + free // 10
    with pytest.raises(InputError) as error:
        check_room([("--checkpoint x", tmp_path / "a", half), ("--save x", tmp_path / "b", half)])
    assert (error.value.code, error.value.where) == ("output.disk-full", "--save x")


def test_output_is_probed_beside_it(tmp_path: Path) -> None:
    assert folder_of(tmp_path / "out") == tmp_path
    assert folder_of(tmp_path / "deep" / "out") == tmp_path


def test_small_file_that_cannot_be_written_leaves_no_partial_one(tmp_path: Path) -> None:
    from manifests.store import write_file

    (tmp_path / "name").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "name", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_new_file_replaces_another_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("")
    with pytest.raises(InputError) as error:
        check_new_file(tmp_path / "page.html", "--out", force=False)
    assert (error.value.code, error.value.where) == ("output.exists", str(tmp_path / "page.html"))
    check_new_file(tmp_path / "page.html", "--out", force=True)
    check_new_file(tmp_path / "other.html", "--out", force=False)


@pytest.mark.parametrize("path", ["absent/page.html", "folder"])
def test_new_file_without_a_folder_or_named_as_one_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError) as error:
        check_new_file(tmp_path / path, "--out", force=True)
    assert error.value.code == "output.unwritable"
