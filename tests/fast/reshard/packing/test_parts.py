"""Packs in parts: the bytes of one pack, whoever wrote them and in whatever order.

`tests/process/reshard/packing/test_events.py` kills parts and commits at any change of the disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard.packing.options import Part, shards_of_part
from reshard.plans.pack_plan import OutputShard, lay_out_shard
from reshard.tensors.lazy import MemoryFile
from stores.base import PART_NAME
from stores.bundles import TensorAt
from tests.builders import (
    Ended,
    files_in,
    leftovers,
    llama_config,
    pack,
    random_tensors,
    refusal,
    reshard,
    write_model,
)

ROOT = Path(__file__).resolve().parents[4]
CONFIG = llama_config(
    hidden_size=512,
    num_attention_heads=16,
    num_key_value_heads=1,
    intermediate_size=64,
    num_hidden_layers=4,
    vocab_size=64,
)
SPEC = "pp=4"  # one shard for each of four stages


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts") / "source"
    write_model(folder, CONFIG, random_tensors(CONFIG, dtypes=["F32"]), num_shards=3)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    out = source.parent / "whole"
    pack(source, out, SPEC)
    return files_in(out)


def part_of(source: Path, out: Path, part: str, *flags: str) -> tuple[str | Path, ...]:
    return ("pack", source, "--layout", SPEC, "--out", out, "--part", part, *flags)


def pack_part(*args: Any) -> Ended:
    return reshard(*part_of(*args))


def place_of(out: Path, part: str) -> Path:
    """Return the folder of a part that is complete."""
    (folder,) = out.with_name(f".{out.name}.parts").glob(f"parts-*/part-{part}")
    return folder


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_parts_in_any_order_have_the_bytes_of_one_pack(
    num_parts: int, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for number in random.Random(num_parts).sample(range(1, num_parts + 1), num_parts):
        assert pack_part(source, out, f"{number}/{num_parts}").code == 0
        assert not out.exists()
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("flag", ["--part", "--parts"])
def test_more_parts_than_shards_are_refused_naming_the_most(flag: str, source: Path, tmp_path: Path) -> None:
    asked = ("--part", "1/5") if flag == "--part" else ("--parts", "5", "--scheduler", "slurm", "--dry-run")
    refused = refusal("pack", source, "--layout", SPEC, "--out", tmp_path / "out", *asked)
    assert refused.found == (2, "options.too-many-parts", flag)
    assert "at most 4 parts" in refused.text
    pack(source, tmp_path / "out", SPEC, *asked[2:], flag, asked[1].replace("5", "4"))


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [100, 1, 1, 1], [1, 1, 1, 100], [7, 3, 50, 2, 9, 1, 30]], ids=str)
def test_each_shard_is_of_one_part_and_no_part_is_empty(sizes: list[int]) -> None:
    shards = [_shard_of(number, size << 12) for number, size in enumerate(sizes)]
    for num_parts in range(1, len(shards) + 1):
        parts = [shards_of_part(shards, Part(number=number, of=num_parts)) for number in range(1, num_parts + 1)]
        assert all(parts)
        assert [shard for part in parts for shard in part] == shards


def _shard_of(number: int, nbytes: int) -> OutputShard:
    return lay_out_shard(
        f"{number}.safetensors", [TensorAt("a", "U8", (nbytes,), MemoryFile("source", b""), 0, nbytes)]
    )


def test_missing_parts_are_named_with_the_command_that_packs_one(
    source: Path, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    out = tmp_path / "out"
    refused = refusal("commit", out)
    assert refused.found == (3, "output.no-parts", str(out))
    wording(refused.text)
    for number in (1, 4):
        assert pack_part(source, out, f"{number}/4").code == 0
    refused = refusal("commit", out)
    assert refused.found == (3, "output.missing-parts", str(out))
    wording(refused.text.replace(str(source), "SOURCE"))
    assert f"reshard pack {source} --layout {SPEC} --out {out} --part 2/4" in refused.text
    for number in (2, 3):
        assert pack_part(source, out, f"{number}/4").code == 0
    assert reshard("commit", out).code == 0


@pytest.mark.parametrize("flags", [("--layout", "pp=3"), ("--dtype", "bf16"), ("--part", "2/3")], ids=" ".join)
def test_part_of_another_plan_is_refused(
    flags: tuple[str, ...], source: Path, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    assert pack_part(source, tmp_path / "out", "1/2").code == 0
    refused = refusal(*part_of(source, tmp_path / "out", "2/2", *flags))
    assert refused.found == (3, "output.other-plan", str(tmp_path / "out"))
    if "--dtype" in flags:
        wording(re.sub("parts-[0-9a-f]{12}", "parts-KEY", refused.text))


@pytest.mark.parametrize("name", ["config.json", "notes.txt"])
def test_part_of_a_source_whose_small_files_changed_since_the_first_part_is_refused(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source", CONFIG)
    (tmp_path / "source" / "notes.txt").write_text("one")
    assert pack_part(tmp_path / "source", tmp_path / "out", "1/2").code == 0
    with open(tmp_path / "source" / name, "a") as file:
        file.write("\n")
    refused = refusal(*part_of(tmp_path / "source", tmp_path / "out", "2/2"))
    assert refused.found == (3, "output.other-plan", str(tmp_path / "out"))


def test_same_part_twice_at_once_is_refused_and_others_are_not(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack_part(source, out, "2/2").code == 0
    partial = place_of(out, "00002-of-00002").with_name(".part-00001-of-00002.partial")
    partial.mkdir()
    folder = os.open(partial, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert refusal(*part_of(source, out, "1/2")).found[:2] == (3, "output.in-use")
    assert pack_part(source, out, "2/2").code == 0
    os.close(folder)
    assert pack_part(source, out, "1/2").code == 0
    assert reshard("commit", out).code == 0


def test_parts_are_refused_where_their_commit_could_not_replace_the_output(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel cannot exchange the names of two folders on NFS."""
    out = tmp_path / "out"
    pack(source, out)
    before = files_in(tmp_path)
    monkeypatch.setattr("stores.folders.publish._RENAME_EXCHANGE", 1 << 10)
    asked = ("pack", source, "--layout", SPEC, "--out", out, "--parts", "2", "--scheduler", "slurm", "--dry-run")
    for command in (part_of(source, out, "1/2"), asked):
        assert refusal(*command, "--force").found == (3, "output.cannot-replace", str(out))
    assert files_in(tmp_path) == before


def test_whole_pack_and_parts_leave_each_others_work_alone(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert pack_part(source, out, "1/2").code == 0
    pack(source, out)
    assert refusal(*part_of(source, out, "2/2")).found == (3, "output.exists", str(out))
    assert pack_part(source, out, "2/2", "--force").code == 0
    assert refusal("commit", out).found == (3, "output.exists", str(out))
    assert reshard("commit", out, "--force").code == 0
    assert files_in(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_damaged_part_is_not_committed_and_is_packed_again_alone(
    damage: str, source: Path, whole: dict[str, bytes], tmp_path: Path, wording: Callable[[str], None]
) -> None:
    out = tmp_path / "out"
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    shard = next(iter(sorted(place_of(out, "00002-of-00002").rglob("*.safetensors"))))
    first = next(iter(sorted(place_of(out, "00001-of-00002").rglob("*.safetensors")))).stat()
    os.truncate(shard, shard.stat().st_size - 1) if damage == "cut" else shard.unlink()
    refused = refusal("commit", out)
    assert refused.found == (3, "output.damaged-parts", str(shard))
    if damage == "cut":
        wording(refused.text.replace(shard.parts[-3], "parts-KEY"))
    assert not out.exists()
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    again = next(iter(sorted(place_of(out, "00001-of-00002").rglob("*.safetensors")))).stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole


def test_shards_of_another_pack_are_not_committed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_model(tmp_path / "old", CONFIG, random_tensors(CONFIG, dtypes=["F32"], seed=1), num_shards=3)
    pack(tmp_path / "old", tmp_path / "other", SPEC)
    assert pack_part(source, out, "1/1").code == 0
    place = place_of(out, "00001-of-00001")
    for shard in place.rglob("*.safetensors"):
        shutil.copy(tmp_path / "other" / shard.relative_to(place), shard)
    assert refusal("commit", out).found[:2] == (3, "output.damaged-parts")
    assert not out.exists()


@pytest.mark.parametrize(
    ("call", "is_there"),
    [
        ("rename", True),
        ("unlink", True),
        pytest.param("rename", False, marks=pytest.mark.slow),
        pytest.param("unlink", False, marks=pytest.mark.slow),
        *(pytest.param("rmdir", is_there, marks=pytest.mark.slow) for is_there in (False, True)),
    ],
)
def test_commit_that_was_killed_at_any_change_is_finished_by_a_commit(
    call: str, is_there: bool, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """With what it replaces, the folder of that has the name of the partial one when the commit is killed."""
    flags = ("--force",) if is_there else ()
    write_model(tmp_path / "old", CONFIG, random_tensors(CONFIG, dtypes=["F32"], seed=1), num_shards=3)
    pack(tmp_path / "old", tmp_path / "older", SPEC)
    for number in range(40):
        place = tmp_path / str(number)
        place.mkdir()
        out = place / "out"
        if is_there:
            shutil.copytree(tmp_path / "older", out)
        for part in ("1/2", "2/2"):
            assert pack_part(source, out, part, *flags).code == 0
        is_killed = _end_at(lambda: reshard("commit", out, *flags), call, lambda path: True, number)  # noqa: B023
        assert not out.exists() or files_in(out) in (whole, files_in(tmp_path / "older"))
        assert reshard("commit", out, *flags).code == 0
        assert files_in(out) == whole
        assert [path.name for path in place.iterdir()] == ["out"]
        if not is_killed:
            break
    assert not is_killed
    assert number > 0


@pytest.mark.parametrize("is_written", [False, True])
def test_files_of_others_in_what_a_killed_commit_has_replaced_stay(
    is_written: bool, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """So does the folder of that name in which a process writes."""
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    shutil.copytree(source.parent / "whole", out)
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part, "--force").code == 0
    assert _end_at(lambda: reshard("commit", out, "--force"), "unlink", lambda path: path.endswith(".safetensors"), 0)
    if is_written:
        lock = os.open(partial, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    else:
        (partial / "mine.txt").write_text("mine")
    before = files_in(partial)
    assert reshard("commit", out, "--force").code == 0
    assert files_in(partial) == before
    assert files_in(out) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial", "out"]
    if is_written:
        os.close(lock)


def test_part_that_is_run_again_after_a_killed_commit_does_no_harm(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    assert _end_at(lambda: reshard("commit", out), "rename", lambda path: path.endswith("tensors"), 2)
    assert pack_part(source, out, "1/2").code == 0
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_commits_at_once_publish_the_parts_once(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Copies of this process: a commit finds the parts, those that another one has moved, or the output."""
    for number in range(5):
        out = tmp_path / str(number) / "out"
        for part in ("1/2", "2/2"):
            assert pack_part(source, out, part).code == 0
        codes = _run_at_once([lambda: reshard("commit", out)] * 3)  # noqa: B023
        assert set(codes) <= {0, 3}, codes
        assert 0 in codes
        assert files_in(out) == whole
        assert reshard("commit", out).code == 0
        assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_files_of_others_beside_the_parts_stay_when_they_are_committed(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    (tmp_path / ".out.parts" / "notes").mkdir()
    (tmp_path / ".out.parts" / "notes" / "mine.txt").write_text("mine")
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole
    assert files_in(tmp_path / ".out.parts") == {"notes/mine.txt": b"mine"}
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "mine.txt").write_text("mine")
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part, "--force").code == 0
    assert refusal("commit", out, "--force").found == (3, "output.foreign-partial", str(tmp_path / ".out.partial"))
    assert files_in(out) == whole
    assert files_in(tmp_path / ".out.partial") == {"mine.txt": b"mine"}


def _run_at_once(acts: list[Callable[[], Ended]]) -> list[int]:
    """Run these in copies of this process, and return their exit codes."""
    children = []
    for act in acts:
        if not (child := os.fork()):
            code = 1
            try:
                code = act().code
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_commit_waits_for_parts_that_are_not_there_yet(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, parts = tmp_path / "out", ["1/2", "2/2"]

    def sleep(seconds: float) -> None:
        assert pack_part(source, out, parts.pop(0)).code == 0

    monkeypatch.setattr("reshard.packing.parts.time.sleep", sleep)
    assert reshard("commit", out, "--wait").code == 0
    assert files_in(out) == whole
    assert parts == []


def test_commit_in_place_of_a_checkpoint_waits_for_parts_of_which_none_is_finished(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, parts = tmp_path / "out", ["1/2", "2/2"]
    write_model(tmp_path / "old", CONFIG, random_tensors(CONFIG, dtypes=["F32"], seed=1))
    pack(tmp_path / "old", out, SPEC)
    assert _end_at(lambda: pack_part(source, out, "1/2", "--force"), "rename", lambda path: ".part-00001" in path, 0)
    assert refusal("commit", out, "--force").found == (3, "output.no-parts", str(out))

    def sleep(seconds: float) -> None:
        assert pack_part(source, out, parts.pop(0), "--force").code == 0

    monkeypatch.setattr("reshard.packing.parts.time.sleep", sleep)
    for _ in range(2):  # again, as a scheduler that requeues it
        assert reshard("commit", out, "--force", "--wait").code == 0
        assert files_in(out) == whole
    assert parts == []


def _end_at(work: Callable[[], object], name: str, counts: Callable[[str], bool], number: int) -> bool:
    """Do this in a copy of this process, which ends before such a call of os, counted from 0; return whether it did."""
    pid = os.fork()
    if pid == 0:
        function = getattr(os, name)

        def counted(path: str, *rest: object, **where: int) -> None:
            nonlocal number
            if counts(str(path)):
                if number == 0:
                    os._exit(0)
                number -= 1
            function(path, *rest, **where)

        setattr(os, name, counted)
        try:
            work()
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return code == 0


SLURM = ("--parts", "4", "--scheduler", "slurm")


@pytest.mark.parametrize(
    ("flags", "code", "where"),
    [
        (("--part", "0/4"), "options.bad-part", "--part"),
        (("--part", "5/4"), "options.bad-part", "--part"),
        (("--part", "first"), "options.bad-part", "--part"),
        (("--part", "1/4", "--virtual"), "options.conflict", "--part"),
        (("--part", "1/4", "--verify-source"), "options.conflict", "--verify-source"),
        (("--part", "1/4", *SLURM), "options.conflict", "--part"),
        (("--parts", "4"), "options.needs-scheduler", "--parts"),
        (("--scheduler", "slurm"), "options.needs-scheduler", "--scheduler"),
        (("--account", "us"), "options.needs-scheduler", "--account"),
        (("--sbatch-arg", "--mem=8G"), "options.needs-scheduler", "--sbatch-arg"),
        ((*SLURM, "--sbatch-arg", "gpus"), "options.sbatch-argument", "--sbatch-arg"),
        ((*SLURM, "--sbatch-arg", "--array=1-2"), "options.sbatch-argument", "--sbatch-arg"),
        ((*SLURM, "--sbatch-arg", "--comment=don't"), "options.sbatch-argument", "--sbatch-arg"),
        ((*SLURM, "--sbatch-arg", "--comment=a b"), "options.sbatch-argument", "--sbatch-arg"),
        ((*SLURM, "--sbatch-arg", "--exclusive # x"), "options.sbatch-argument", "--sbatch-arg"),
        ((*SLURM, "--time", ""), "usage.arguments", "--time"),
        ((*SLURM, "--partition", "a\nb"), "options.sbatch-argument", "--sbatch-arg"),
        (("--part", "1/4", "--out", "hf://org/name"), "options.parts-store", "--part"),
        (("--part", "1/4", "--out", "s3://b/p", "--force"), "options.conflict", "--force"),
        ((*SLURM, "--sbatch-arg", "-a1-2"), "options.sbatch-argument", "--sbatch-arg"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    flags: tuple[str, ...], code: str, where: str, source: Path, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    refused = refusal("pack", source, "--layout", SPEC, "--out", tmp_path / "out", *flags)
    assert refused.found == (2, code, where)
    wording(refused.text)
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--layout", "pp=99"), (2, "layout.uneven-split", "layout")),
        (("--layout", SPEC, "--out", "{place}/taken"), (3, "output.exists", "{place}/taken")),
        (("--layout", SPEC, "--out", "{place}/file/out"), (3, "output.unwritable", "{place}/file/out")),
    ],
)
def test_pack_that_would_fail_is_not_submitted(
    flags: tuple[str, ...], found: tuple[int, str, str], source: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_bytes(b"")
    (tmp_path / "file").write_bytes(b"")
    asked = ("--out", tmp_path / "out", *SLURM, "--dry-run")
    refused = refusal("pack", source, *asked, *(flag.format(place=tmp_path) for flag in flags))
    assert refused.found == (*found[:2], found[2].format(place=tmp_path))


def test_parts_that_cannot_be_submitted_say_why(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reshard", "pack", str(source), "--layout", "pp=2"]
    command += ["--out", str(tmp_path / "out"), "--parts", "2", "--scheduler", "slurm", "--json"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30)
    assert json.loads(done.stdout)["error"]["where"] == "sbatch"


def test_commit_that_has_ended_says_so_when_it_is_run_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "source")
    out = tmp_path / "out"
    for number in (1, 2):
        pack(tmp_path / "source", out, "pp=2", "--part", f"{number}/2")
    first = reshard("commit", out, "--json")
    before = files_in(out)
    for flags in ((), ("--force",)):
        again = reshard("commit", out, "--json", *flags)
        assert (again.code, again.out) == (0, first.out)
    assert files_in(out) == before
    (note,) = caplog.messages  # with --force, which may have been run before any part has begun
    assert str(out) in note
    nothing = reshard("commit", tmp_path / "nothing", "--json")
    assert (nothing.code, nothing.json["error"]["code"]) == (3, "output.no-parts")


CLIMBING = "parts-0123456789ab/part-00001-of-00002/../../../../outside"
RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no files": lambda record: record.pop("files"),
    "no shards": lambda record: record.pop("shards"),
    "no manifest": lambda record: record.pop("manifest"),
    "list of files": lambda record: record.update(files=[*record["files"]]),
    "size as text": lambda record: record.update(files={path: ["1", ""] for path in record["files"]}),
    "file that climbs": lambda record: record["files"].update({"../../../../outside": [8, ""]}),
    "shard without digest": lambda record: next(iter(record["shards"].values())).pop("digest"),
    "command of numbers": lambda record: record.update(command=[1]),
}


@pytest.mark.parametrize("damage", [*RECORDS, "cut short"])
def test_record_of_a_part_that_is_no_record_is_refused_and_its_part_packed_again(
    damage: str, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "outside").write_bytes(b"not ours")
    out = tmp_path / "out"
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    path = place_of(out, "00001-of-00002") / PART_NAME
    record = json.loads(path.read_bytes())
    RECORDS.get(damage, dict)(record)
    path.write_text(json.dumps(record)[: 30 if damage == "cut short" else None])
    assert refusal("commit", out).found == (3, "output.damaged-parts", str(path))
    assert pack_part(source, out, "1/2").code == 0
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole
    assert (tmp_path / "outside").read_bytes() == b"not ours"


@pytest.mark.parametrize(
    "moved", ["", *map(json.dumps, ({CLIMBING: 8}, {"x": 1}, {CLIMBING.replace("../", "a/"): "8"}))]
)
def test_record_of_moved_files_that_is_none_is_refused(moved: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    planted = out.with_name(".out.parts") / "moved.json"
    planted.write_text(moved)
    assert refusal("commit", out).found == (3, "output.damaged-parts", str(planted))
    assert not out.exists()
