"""Folders that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from manifests.errors import InputError, UnreachableError, UserError
from stores.folders.owned import write_record
from stores.folders.probe import check_new_file, check_room, check_writable
from stores.folders.publish import Swap, exchange, exchange_or_rename, publishing
from tests.builders import files_in
from tests.refusals import refusal

ROOT = Path(__file__).parents[4]


def find_owned(folder: Path) -> set[str] | None:
    return {"ours", "below/file"} if (folder / "ours").exists() else None


def publish(
    out: Path,
    text: str = "new",
    *,
    force: bool = False,
    swap: Swap = exchange,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    with publishing(out, force=force, find_owned=find_owned, swap=swap) as folder:
        (folder / "ours").write_text(text)
        meanwhile()
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text(text)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(out: Path, *, force: bool = False) -> UserError:
    """Return the error of a publication, which names the output."""
    error = refusal(lambda: publish(out, force=force))
    assert error.where == str(out)
    return error


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    publish(tmp_path / "out")
    assert names_in(tmp_path) == ["out"]
    assert names_in(tmp_path / "out") == ["below", "ours"]


@pytest.mark.parametrize("out", [".", "../out", "../link", "{tmp}/out"])
@pytest.mark.parametrize("force", [False, True])
def test_working_folder_is_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, force: bool
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    monkeypatch.chdir(tmp_path / "out")
    if force:
        (tmp_path / "out" / "ours").write_text("old")
    error = refusal(lambda: publish(Path(out.format(tmp=tmp_path)), force=force))
    assert (error.code, Path.cwd()) == ("output.working-folder", tmp_path / "out")
    assert names_in(tmp_path) == ["link", "out"]


def test_folder_around_the_working_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out" / "below")
    assert refusal(lambda: publish(Path(".."), force=True)).code == "output.working-folder"
    assert Path.cwd() == tmp_path / "out" / "below"


def test_force_replaces_the_old_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out, "old")
    out.chmod(0o2750)
    publish(out, "new", force=True)
    assert out.stat().st_mode & 0o7777 == 0o2750
    assert names_in(tmp_path) == ["out"]
    assert names_in(out) == ["below", "ours"]
    assert (out / "below" / "file").read_text() == "new"


def test_force_replaces_a_folder_that_its_owner_may_not_write_to() -> None:
    """As somebody else than root, who may write anywhere."""
    user = os.geteuid() or 65534
    with TemporaryDirectory() as place:
        out = Path(place, "out")
        publish(out, "old")
        out.chmod(0o555)
        for path in (Path(place), *Path(place).rglob("*")):
            os.chown(path, user, -1)
        os.seteuid(user)
        try:
            publish(out, "new", force=True)
        finally:
            os.seteuid(os.getuid())
        assert names_in(Path(place)) == ["out"]
        assert files_in(out) == {"ours": b"new", "below/file": b"new"}


@pytest.mark.parametrize("name", ["notes.txt", ".journal"])
def test_folder_to_which_a_file_is_added_while_its_successor_is_written_is_not_replaced(
    tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    publish(out, "old")
    late = refusal(lambda: publish(out, "new", force=True, meanwhile=lambda: (out / name).write_text("mine")))
    assert late.code == "output.foreign-file"
    assert files_in(out) == {"ours": b"old", "below/file": b"old", name: b"mine"}


def test_force_replaces_only_folders_of_ours(tmp_path: Path, wording: Callable[[str], None]) -> None:
    home, file, link = tmp_path / "home", tmp_path / "file", tmp_path / "link"
    home.mkdir()
    (home / "thesis.tex").touch()
    file.touch()
    publish(tmp_path / "out")
    link.symlink_to(tmp_path / "out")
    before = names_in(tmp_path)
    for out in (home, file, link):
        error = refused(out, force=True)
        assert error.code == "output.not-ours"
    wording(str(error))
    assert names_in(tmp_path) == before
    assert names_in(home) == ["thesis.tex"]


def test_the_journal_goes_with_the_rename_and_comes_back_when_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"

    def publish_from_journal() -> None:
        with publishing(
            out, force=True, find_owned=find_owned, wanted=["ours"], outlives_errors=True, is_resumable=lambda _: True
        ) as folder:
            (folder / "ours").write_text("new")
            (folder / ".journal").write_text('{"names": []}')

    with monkeypatch.context() as failing:
        failing.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        assert refusal(publish_from_journal).code == "output.unwritable"
    assert (partial / ".journal").read_text() == '{"names": []}'
    publish_from_journal()
    assert names_in(out) == ["ours"]
    assert names_in(tmp_path) == ["out"]


def test_what_a_kill_left_is_cleared_away(tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    (partial / "stage-000").mkdir(parents=True)
    write_record(partial, ["stage-000/model.safetensors", "link"])
    (partial / "stage-000" / "model.safetensors").write_bytes(b"half")
    (partial / "stage-000" / ".model.safetensors.partial").write_bytes(b"quarter")
    (partial / "link").symlink_to(tmp_path)
    publish(tmp_path / "out")
    assert names_in(tmp_path) == ["out"]
    assert names_in(tmp_path / "out") == ["below", "ours"]


def test_what_a_kill_left_of_a_replaced_folder_is_cleared_away_though_another_kill_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed swap leaves it without a record."""
    partial, unlink = tmp_path / ".out.partial", os.unlink
    (partial / "below").mkdir(parents=True)
    for name in ("ours", "below/file"):
        (partial / name).write_text("old")

    def killed(path: Path, **options: int) -> None:
        unlink(partial / "ours")  # by which `find_owned` knows the others
        os._exit(0)

    if not (child := os.fork()):
        try:
            monkeypatch.setattr(os, "unlink", killed)
            publish(tmp_path / "out")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not (partial / "ours").exists()
    assert (partial / "below" / "file").exists()
    publish(tmp_path / "out")
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("record", [None, b"", b"{}\n", b'{"names": ["ours"]}\n', b"mine"])
def test_partial_folder_of_others_is_refused_and_kept(
    record: bytes | None, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    partial = tmp_path / ".out.partial"
    for name in ("thesis.tex", ".config.json.partial", "below/deep/notes"):
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_text("years of work")
    if record is not None:
        (partial / ".journal").write_bytes(record)
    before = files_in(tmp_path)
    error = refusal(lambda: publish(tmp_path / "out"))
    assert (error.code, error.where) == ("output.foreign-partial", str(partial))
    assert files_in(tmp_path) == before
    if record is None:
        wording(str(error).replace(str(tmp_path), "TMP"))


def test_a_partial_folder_that_is_a_link_is_not_followed(tmp_path: Path, wording: Callable[[str], None]) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    (tmp_path / ".out.partial").symlink_to(home)
    error = refused(tmp_path / "out")
    assert error.code == "output.cannot-lock"
    wording(str(error))
    assert names_in(home) == ["thesis.tex"]


def test_folder_that_another_process_is_writing_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    out = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from stores.folders.publish import publishing\n"
        "with publishing(Path(sys.argv[1]), force=False, find_owned=lambda _: None) as folder:\n"
        "    (folder / 'ours').write_text('theirs'); print('writing', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, out], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "writing\n"
        error = refused(out)
        assert error.code == "output.in-use"
        wording(str(error))
        assert names_in(tmp_path) == [".out.partial"]
        other.stdin.close()
        assert other.wait(30) == 0
    assert (out / "ours").read_text() == "theirs"
    assert names_in(tmp_path) == ["out"]


def test_folder_that_came_to_be_meanwhile_is_not_replaced_unasked(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def appear() -> None:
        out.mkdir()
        (out / "ours").write_text("theirs")

    assert refusal(lambda: publish(out, meanwhile=appear)).code == "output.exists"
    assert (out / "ours").read_text() == "theirs"
    assert names_in(tmp_path) == ["out"]


def test_old_folder_is_locked_while_it_is_taken_away(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out, "old")
    held = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert refused(out, force=True).code == "output.in-use"
    finally:
        os.close(held)
    assert (out / "ours").read_text() == "old"
    assert names_in(tmp_path) == ["out"]


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    (tmp_path / "file").touch()
    error = refused(tmp_path / "file" / "out")
    assert error.code == "output.unwritable"
    wording(str(error))


@pytest.mark.parametrize("is_there", [False, True])
def test_commit_that_cannot_be_brought_to_disk_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    out, fsync = tmp_path / "out", os.fsync
    if is_there:
        out.mkdir()
        (out / "old").write_text("old")

    def fails_above(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_above)
    with (
        pytest.raises(UnreachableError) as error,
        publishing(out, force=True, find_owned=lambda folder: {"old"}) as folder,
    ):
        (folder / "new").write_text("new")
    assert error.value.code == "output.unwritable"
    assert sorted(path.name for path in tmp_path.rglob("*")) == (["old", "out"] if is_there else [])


def test_interrupted_commit_is_undone_and_what_is_kept_is_the_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rerun would not find there what the journal says: seed 433 of the struck commands."""
    out, fsync = tmp_path / "out", os.fsync
    out.mkdir()
    (out / "old").write_text("old")

    def interrupted_above(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise KeyboardInterrupt
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted_above)
    with (
        pytest.raises(KeyboardInterrupt),
        publishing(out, force=True, find_owned=lambda folder: {"old"}, is_resumable=lambda folder: True) as folder,
    ):
        (folder / ".journal").write_text("new")
    assert names_in(out) == ["old"]
    assert names_in(tmp_path / ".out.partial") == [".journal"]


@pytest.fixture
def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel refuse to exchange names, with EINVAL, as on NFS."""
    monkeypatch.setattr("stores.folders.publish._RENAME_EXCHANGE", 1 << 10)


@pytest.mark.usefixtures("without_exchange")
def test_folder_is_replaced_by_renames_where_names_cannot_be_exchanged(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out, "old")
    error = refusal(lambda: publish(out, "new", force=True))
    assert (error.code, files_in(out)["ours"]) == ("output.cannot-replace", b"old")
    publish(out, "new", force=True, swap=exchange_or_rename)
    assert names_in(tmp_path) == ["out"]
    assert files_in(out) == {"ours": b"new", "below/file": b"new"}


@pytest.mark.usefixtures("without_exchange")
@pytest.mark.parametrize(("at", "left"), [(1, {"out": b"old"}), (2, {"out.set-aside-1": b"old"}),
                                          (3, {"out": b"new", "out.set-aside-1": b"old"})])  # fmt: skip
def test_kill_between_renames_leaves_the_replaced_folder_whole(at: int, left: dict[str, bytes], tmp_path: Path) -> None:
    out, place = tmp_path / "out", tmp_path
    publish(out, "old")
    if (child := os.fork()) == 0:
        rename, numbers = os.rename, itertools.count(1)

        def rename_or_die(first: Path, second: Path) -> None:
            if Path(first).parent == place and next(numbers) == at:  # not the probe's
                os._exit(9)
            rename(first, second)

        os.rename = rename_or_die  # type: ignore[assignment]
        publish(out, "new", force=True, swap=exchange_or_rename)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    seen = {path.name: files_in(path) for path in place.iterdir() if not path.name.startswith(".")}
    assert seen == {name: {"ours": text, "below/file": text} for name, text in left.items()}
    publish(out, "new", force=True, swap=exchange_or_rename)
    assert files_in(out) == {"ours": b"new", "below/file": b"new"}
    assert [path.name for path in place.iterdir() if path.name.startswith(".")] == []


@pytest.mark.usefixtures("without_exchange")
def test_rename_that_fails_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename = tmp_path / "out", os.rename
    publish(out, "old")

    def rename_or_fail(first: Path, second: Path) -> None:
        if Path(first).name == ".out.partial":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(first, second)

    monkeypatch.setattr(os, "rename", rename_or_fail)
    error = refusal(lambda: publish(out, "new", force=True, swap=exchange_or_rename))
    assert (error.code, names_in(tmp_path)) == ("output.unwritable", ["out"])
    assert files_in(out) == {"ours": b"old", "below/file": b"old"}


def refuse(first: Path, second: Path) -> None:
    raise InputError(str(second), "cannot be replaced in one step here", "remove it", code="output.cannot-replace")


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


@pytest.mark.parametrize("path", ["absent/page.html", "folder"])
def test_new_file_without_a_folder_or_named_as_one_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError) as error:
        check_new_file(tmp_path / path, "--out", force=True)
    assert error.value.code == "output.unwritable"
