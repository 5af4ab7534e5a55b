"""The folder of a run's checkpoints: found by step, held by one run, and never without a good one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from manifests.errors import InputError, UnreachableError
from runner.checkpoint.history import (
    checkpoint_path,
    claim_history,
    find_checkpoints,
    find_misnamed,
    prune,
    set_aside,
    step_of,
)
from runner.launch.verbs import find_status, status
from runner.rundir.records import JobRecord, write_job_record, write_run_record
from stores.folders.lock import open_locked
from stores.folders.publish import publishing
from tests.builders import files_in
from tests.fast.reshard.forged import change_manifest
from tests.fast.trained import write_trained
from tests.sentinels import plant_in


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained(tmp_path_factory.mktemp("history"), "pp=2", num_hidden_layers=1)


def fill(history: Path, trained: Path, *steps: int) -> None:
    for step in steps:
        shutil.copytree(trained, checkpoint_path(history, step))
        change_manifest(
            checkpoint_path(history, step), lambda document, step=step: document["training"].update(step=step)
        )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_is_the_one_of_the_most_steps_whatever_the_clock_says(trained: Path, tmp_path: Path) -> None:
    fill(tmp_path, trained, 999_999, 20, 1_000_000, 3)
    os.utime(checkpoint_path(tmp_path, 3), (2**33, 2**33))
    checkpoint_path(tmp_path, 50).mkdir()  # no manifest: not a checkpoint
    (tmp_path / "notes").mkdir()
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [1_000_000, 999_999, 20, 3]
    assert find_checkpoints(tmp_path / "nowhere") == ()


def test_newest_checkpoint_is_named_by_the_status_though_a_kill_came_before_its_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, history = tmp_path / "log", tmp_path / "history"
    fill(history, trained, 2, 4, 6)
    (history / "step-000004/manifest.json").write_text("{}")  # it cannot be read, and step 6 is of another run
    log.mkdir()
    record = JobRecord(scheduler="local", id="1", name="x", output="", host=socket.gethostname(), birth="never")
    write_job_record(log, record)
    write_run_record(log, {"id": "x", "launches": [{"resolved": {"steps": 12, "checkpoint": str(history)}}]})
    (log / "metrics.jsonl").write_text('{"rank": 0, "load_s": 0.1}\n{"step": 5, "loss": 1.0}\n')
    assert find_status(log)["last_checkpoint"] == str(history / "step-000002")
    monkeypatch.chdir(tmp_path)
    assert "last checkpoint history/step-000002" in CliRunner().invoke(status, [str(log)]).output
    shutil.rmtree(history)
    history.write_text("no folder")
    assert (find_status(log)["last_step"], find_status(log)["last_checkpoint"]) == (5, None)


@pytest.mark.parametrize("lines", ["", '{"step": 4, "loss": 1.0}\n{"step": 4, "checkpoint": "x"}\n'])
def test_status_of_a_resumed_run_without_a_step_has_the_checkpoint_that_it_resumed(
    lines: str, trained: Path, tmp_path: Path
) -> None:
    log, history = tmp_path / "log", tmp_path / "history"
    fill(history, trained, 2, 4, 6)
    log.mkdir()
    record = JobRecord(scheduler="local", id="1", name="x", output="", host=socket.gethostname(), birth="never")
    write_job_record(log, record)
    resolved = {"steps": 4, "checkpoint": str(history), "first_step": 5}
    write_run_record(log, {"id": "x", "launches": [{"resolved": resolved}]})
    (log / "metrics.jsonl").write_text(lines + '{"rank": 0, "load_s": 0.1}\n')
    assert (find_status(log)["last_step"], find_status(log)["last_checkpoint"]) == (4, str(history / "step-000004"))
    assert "step 4 of 4, last checkpoint " in CliRunner().invoke(status, [str(log)]).output


def test_copy_under_the_name_of_another_step_is_no_checkpoint_and_does_not_push_out_the_newest(
    trained: Path, tmp_path: Path
) -> None:
    fill(tmp_path, trained, 2, 4)
    copied = checkpoint_path(tmp_path, 10)
    shutil.copytree(checkpoint_path(tmp_path, 2), copied)
    before = files_in(copied)
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [4, 2]
    assert find_misnamed(tmp_path) == ((copied, 2),)
    prune(tmp_path, checkpoint_path(tmp_path, 4), keep=1)
    assert names_in(tmp_path) == ["step-000004", "step-000010"]
    set_aside(copied)  # a run that reaches step 10 saves it, and loses nothing
    assert files_in(tmp_path / "step-000010.set-aside-1") == before


def test_disk_that_fails_is_not_taken_for_one_without_checkpoints(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, trained, 3, 20)
    found = os.stat

    def stat(path: Path, **asked: object) -> os.stat_result:
        if str(path) == f"{tmp_path}/step-000020/manifest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return found(path, **asked)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(UnreachableError, match=r"step-000020/manifest\.json: cannot be read: Input/output error"):
        find_checkpoints(tmp_path)


def test_what_kills_left_is_cleared_away_and_nothing_else(trained: Path, tmp_path: Path) -> None:
    fill(tmp_path, trained, 3)
    for name in (".step-000006.partial", ".step-000001.removed"):
        (tmp_path / name / "stage-000").mkdir(parents=True)
    (tmp_path / ".step-mine").mkdir()
    (tmp_path / ".step-000009.partial").symlink_to(tmp_path / ".step-mine")
    with claim_history(tmp_path):
        assert names_in(tmp_path) == [".lock", ".step-000009.partial", ".step-mine", "step-000003"]
    assert names_in(tmp_path) == [".step-000009.partial", ".step-mine", "step-000003"]


@pytest.mark.parametrize("name", [".step-000006.partial", ".step-000001.removed"])
def test_folder_of_others_with_the_name_of_what_kills_leave_is_refused_and_kept(
    name: str, trained: Path, tmp_path: Path
) -> None:
    fill(tmp_path, trained, 3)
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("mine")
    shutil.copytree(trained, tmp_path / ".step-000002.removed")  # of a kill before anything was removed
    with pytest.raises(InputError) as error, claim_history(tmp_path):
        pass
    assert (error.value.code, error.value.where) == ("output.foreign-partial", str(tmp_path / name))
    assert (tmp_path / name / "notes.txt").read_text() == "mine"
    (tmp_path / name / "notes.txt").unlink()
    with claim_history(tmp_path):
        assert names_in(tmp_path) == [".lock", "step-000003"]


def test_folder_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    history = tmp_path / "deep" / "history"
    with claim_history(history), pytest.raises(InputError) as error, claim_history(history):
        pass
    assert (error.value.code, error.value.where) == ("launch.folder-in-use", f"--checkpoint {history}")
    with claim_history(history):
        pass


def test_what_the_run_was_told_to_begin_with_stays_however_it_is_called(trained: Path, tmp_path: Path) -> None:
    history = tmp_path / "history"
    fill(history, trained, 10, 20, 30, 40)
    (tmp_path / "link").symlink_to(history)
    prune(history, checkpoint_path(history, 40), keep=1, spared=(checkpoint_path(tmp_path / "link", 20), None))
    assert names_in(history) == ["step-000020", "step-000040"]


def test_what_cannot_be_removed_of_an_earlier_run_is_named_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS keeps a file that another process reads, and so its folder."""
    left = tmp_path / ".step-000001.removed"
    (left / "stage-000").mkdir(parents=True)
    (left / "stage-000" / ".nfs00000000004f36a500000002").touch()

    def rmtree(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with claim_history(tmp_path):
        assert names_in(tmp_path) == [".lock", left.name]
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [str(left)]


def test_removal_that_failed_is_finished_with_the_next(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, trained, 10, 20)

    def rmtree(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(InputError) as error:
            prune(tmp_path, checkpoint_path(tmp_path, 20), keep=1)
    assert (error.value.code, error.value.where) == ("checkpoint.not-pruned", str(tmp_path / ".step-000010.removed"))
    (tmp_path / ".step-000030.partial").mkdir()  # somebody packs a checkpoint to this folder
    assert names_in(tmp_path) == [".step-000010.removed", ".step-000030.partial", "step-000020"]
    prune(tmp_path, checkpoint_path(tmp_path, 20), keep=1)
    assert names_in(tmp_path) == [".step-000030.partial", "step-000020"]


def test_each_file_that_is_removed_is_progress(trained: Path, tmp_path: Path) -> None:
    fill(tmp_path, trained, 10, 20)
    shutil.copytree(trained, tmp_path / ".step-000015.partial")
    claim, pruning, files = list[str](), list[str](), files_in(trained)
    with claim_history(tmp_path, partial(claim.append, "")):
        prune(tmp_path, checkpoint_path(tmp_path, 20), keep=1, beat=partial(pruning.append, ""))
    assert names_in(tmp_path) == ["step-000020"]
    num_read = sum(name.endswith(".safetensors") for name in files)  # of the newest
    assert len(claim) > len(files)
    assert len(pruning) > num_read + len(files)


def test_checkpoint_that_another_process_packs_to_the_folder_is_left_to_it(trained: Path, tmp_path: Path) -> None:
    with publishing(checkpoint_path(tmp_path, 9), force=False, find_owned=lambda _: None, wanted=["shard"]) as partial:
        (partial / "shard").write_bytes(b"half")
        with claim_history(tmp_path):
            assert (partial / "shard").read_bytes() == b"half"
    assert names_in(tmp_path) == ["step-000009"]


@pytest.mark.parametrize("name", [".step-000003.partial", ".step-000003.removed"])
def test_removal_that_is_killed_twice_leaves_nothing_that_the_next_run_refuses(
    name: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first kill comes when the record is gone or not there yet, and the manifest says whose files they are."""
    left, unlink = tmp_path / name, os.unlink
    shutil.copytree(trained, left)

    def killed(path: Path, **options: Any) -> None:
        unlink(left / "manifest.json")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt), claim_history(tmp_path):
            pass
    assert not (left / "manifest.json").exists()
    assert list(left.rglob("*.safetensors"))
    unlink(tmp_path / ".lock")
    with claim_history(tmp_path):
        assert names_in(tmp_path) == [".lock"]


def test_removal_on_a_full_disk_that_is_killed_anywhere_leaves_nothing_that_the_next_run_refuses(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, unlink, iterdir, num_files = (
        tmp_path / ".step-000003.removed",
        os.unlink,
        Path.iterdir,
        len(files_in(trained)),
    )

    def write(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    for num_removed in range(num_files):
        shutil.copytree(trained, left)

        def killed(path: Path, num_removed: int = num_removed, **options: Any) -> None:
            if left in Path(path).parents and len(files_in(left)) == num_files - num_removed:
                raise KeyboardInterrupt
            unlink(path, **options)

        with monkeypatch.context() as patched:
            patched.setattr("stores.folders.owned.write_file", write)
            patched.setattr(os, "unlink", killed)
            patched.setattr(Path, "iterdir", lambda path: iter(sorted(iterdir(path))))  # the manifest before the index
            with pytest.raises(KeyboardInterrupt), claim_history(tmp_path):
                pass
        assert len(files_in(left)) == num_files - num_removed
        with claim_history(tmp_path):
            assert names_in(tmp_path) == [".lock"]


def test_checkpoint_that_cannot_be_looked_through_stays_and_older_ones_go(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, trained, 10, 20, 30)
    closed, scandir = checkpoint_path(tmp_path, 20) / "results", os.scandir
    closed.mkdir()

    def listed(path: str | int) -> object:
        if path == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    prune(tmp_path, checkpoint_path(tmp_path, 30), keep=1)
    assert names_in(tmp_path) == ["step-000020", "step-000030"]
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [str(closed.parent)]


def test_checkpoint_with_files_of_others_in_it_is_not_pruned(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, trained, 10, 20, 30, 40)
    sentinels = plant_in(checkpoint_path(tmp_path, 20), beside_ours="stage-000")
    (checkpoint_path(tmp_path, 10) / "manifest.json").write_text('{"name": "web app"}')
    prune(tmp_path, checkpoint_path(tmp_path, 40), keep=1)
    sentinels.check()
    assert names_in(tmp_path) == ["step-000010", "step-000020", "step-000040"]
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        str(checkpoint_path(tmp_path, step)) for step in (20, 10)
    ]


def test_checkpoint_whose_manifest_cannot_be_read_takes_no_other_ones_place(trained: Path, tmp_path: Path) -> None:
    fill(tmp_path, trained, 10, 20, 30, 40)
    (checkpoint_path(tmp_path, 30) / "manifest.json").write_text("{}")
    prune(tmp_path, checkpoint_path(tmp_path, 40), keep=2)
    assert names_in(tmp_path) == ["step-000020", "step-000030", "step-000040"]


def test_checkpoint_whose_manifest_cannot_be_read_gives_way_whole(trained: Path, tmp_path: Path) -> None:
    fill(tmp_path, trained, 10, 20)
    damaged = checkpoint_path(tmp_path, 20)
    (damaged / "manifest.json").write_text('{"format": "reshard-mani')
    (tmp_path / "step-000020.set-aside-1").touch()
    before = files_in(damaged)
    for step in (20, 30):
        set_aside(checkpoint_path(tmp_path, step))
    assert files_in(tmp_path / "step-000020.set-aside-2") == before
    assert names_in(tmp_path) == ["step-000010", "step-000020.set-aside-1", "step-000020.set-aside-2"]
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [10]


def test_checkpoint_of_the_same_step_that_was_not_resumed_gives_way_whole(trained: Path, tmp_path: Path) -> None:
    """NFS cannot exchange the names of two folders: a save that replaces it would fail there each time."""
    fill(tmp_path, trained, 10, 20)
    before = files_in(checkpoint_path(tmp_path, 20))
    set_aside(checkpoint_path(tmp_path, 20))
    assert files_in(tmp_path / "step-000020.set-aside-1") == before
    assert names_in(tmp_path) == ["step-000010", "step-000020.set-aside-1"]


@pytest.mark.parametrize("kind", ["copy", "file", "link", "dangling"])
def test_what_is_no_checkpoint_gives_way_under_the_name_of_one(kind: str, trained: Path, tmp_path: Path) -> None:
    history, other = tmp_path / "history", tmp_path / "other"
    fill(history, trained, 10)
    fill(other, trained, 20)
    path, aside = checkpoint_path(history, 20), history / "step-000020.set-aside-1"
    if kind == "copy":  # interrupted
        shutil.copytree(trained, path)
        (path / "manifest.json").unlink()
    elif kind == "file":
        path.write_text("of somebody")
    else:
        path.symlink_to(checkpoint_path(other, 20) if kind == "link" else "gone")
    before = files_in(history), files_in(other), os.lstat(path).st_ino
    set_aside(path)
    assert names_in(history) == ["step-000010", aside.name]
    aside.rename(path)
    assert (files_in(history), files_in(other), os.lstat(path).st_ino) == before


def test_empty_folder_is_no_obstacle(tmp_path: Path) -> None:
    checkpoint_path(tmp_path, 20).mkdir()
    set_aside(checkpoint_path(tmp_path, 20))
    assert names_in(tmp_path) == ["step-000020"]


def test_what_a_kill_left_of_a_removal_does_not_stop_the_next(trained: Path, tmp_path: Path) -> None:
    fill(tmp_path, trained, 10, 20)
    (tmp_path / ".step-000010.removed" / "stage-000").mkdir(parents=True)
    prune(tmp_path, checkpoint_path(tmp_path, 20), keep=1)
    assert names_in(tmp_path) == ["step-000020"]


def test_earlier_removal_in_which_another_process_writes_does_not_stop_those_of_others(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, trained, 10, 20, 30)
    removed, newest = tmp_path / ".step-000020.removed", checkpoint_path(tmp_path, 30)
    (removed / "stage-000").mkdir(parents=True)
    lock = open_locked(removed, os.O_RDONLY | os.O_DIRECTORY)
    assert lock is not None
    try:
        prune(tmp_path, newest, keep=1)
    finally:
        os.close(lock)
    assert names_in(tmp_path) == [removed.name, "step-000020", "step-000030"]
    named = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert named == [str(checkpoint_path(tmp_path, 20)), str(removed)]
    prune(tmp_path, newest, keep=1)
    assert names_in(tmp_path) == ["step-000030"]


def test_checkpoint_that_was_moved_away_and_linked_to_stays_as_it_is_where_it_is_now(
    trained: Path, tmp_path: Path
) -> None:
    history = tmp_path / "history"
    fill(history, trained, 10, 20)
    checkpoint_path(history, 10).rename(tmp_path / "archived")
    checkpoint_path(history, 10).symlink_to(tmp_path / "archived")
    before = files_in(tmp_path / "archived")
    prune(history, checkpoint_path(history, 20), keep=1)
    assert names_in(history) == ["step-000020"]
    assert files_in(tmp_path / "archived") == before


def test_full_disk_keeps_no_checkpoint_from_being_pruned(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, trained, 10, 20)

    def write(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("stores.folders.owned.write_file", write)
    prune(tmp_path, checkpoint_path(tmp_path, 20), keep=1)
    assert names_in(tmp_path) == ["step-000020"]


def test_disk_that_fails_under_a_removal_is_not_bad_input(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, trained, 10, 20)

    def rename(source: Path, target: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(source))

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(UnreachableError) as error:
        prune(tmp_path, checkpoint_path(tmp_path, 20), keep=1)
    assert (error.value.code, error.value.where) == ("checkpoint.not-pruned", str(tmp_path / "step-000010"))


def test_disk_that_fails_under_what_an_earlier_removal_left_ends_no_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, trained, 20)
    removed, scandir = tmp_path / ".step-000010.removed", os.scandir
    removed.mkdir()

    def failing(path: Any) -> Any:
        if str(path) == str(removed):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    prune(tmp_path, checkpoint_path(tmp_path, 20), keep=1)
    assert names_in(tmp_path) == [removed.name, "step-000020"]


def test_disk_that_fails_while_the_newest_is_read_back_ends_no_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, trained, 10, 20)
    shard, stat = checkpoint_path(tmp_path, 20) / "stage-000/exp_avg/model.safetensors", os.stat

    def failing(path: Path, **options: object) -> os.stat_result:
        if str(path) == str(shard):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", failing)
        with pytest.raises(UnreachableError) as error:  # which a run logs
            prune(tmp_path, checkpoint_path(tmp_path, 20), keep=1)
    assert (error.value.code, error.value.where) == ("store.unreadable", str(shard))
    assert names_in(tmp_path) == ["step-000010", "step-000020"]


@pytest.mark.parametrize("damage", ["cut", "gone", "header", "manifest"])
def test_nothing_is_taken_away_while_the_newest_cannot_be_read_back(damage: str, trained: Path, tmp_path: Path) -> None:
    fill(tmp_path, trained, 10, 20)
    newest = checkpoint_path(tmp_path, 20)
    shard = newest / "stage-001/exp_avg_sq/model.safetensors"
    data = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(data[:-1])
    elif damage == "gone":
        shard.unlink()
    elif damage == "header":
        shard.write_bytes(data.replace(b"F32", b"I32", 1))
    else:
        document = json.loads((newest / "manifest.json").read_text())
        del document["layout"]
        (newest / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=str(newest)):
        prune(tmp_path, newest, keep=1)
    assert names_in(tmp_path) == ["step-000010", "step-000020"]
