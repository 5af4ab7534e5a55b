"""Packs in parts: the bytes of one pack, whoever wrote them, in whatever order, however often they were killed."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reshard.copy.destination import FolderTarget
from reshard.operations.pack import records_folder
from reshard.plans.pack_plan import OutputShard, lay_out_shard
from reshard.plans.partition import partition
from reshard.tensors.lazy import MadeFile, MemoryFile
from stores.bundles import TensorAt
from stores.local import LocalFile
from tests.builders import Ended, files_in, leftovers, llama_config, random_tensors, refusal, reshard, run, write_model
from tests.steps import steps_of

ROOT = Path(__file__).resolve().parents[3]
# Most tensors end where a sector does: shards can be cut.
CONFIG = llama_config(
    hidden_size=512,
    num_attention_heads=16,
    num_key_value_heads=1,
    intermediate_size=64,
    num_hidden_layers=4,
    vocab_size=64,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts") / "source"
    write_model(folder, CONFIG, random_tensors(CONFIG, dtypes=["F32"]), num_shards=3)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    out = source.parent / "whole"
    assert reshard("pack", source, "--layout", "pp=2", "--out", out).code == 0
    return files_in(out)


def part_of(source: Path, out: Path, part: str, *flags: str) -> tuple[str | Path, ...]:
    return ("pack", source, "--layout", "pp=2", "--out", out, "--part", part, *flags)


def pack_part(*args: Any) -> Ended:
    return reshard(*part_of(*args))


def records_of(out: Path) -> Path:
    """Return the folder of the parts' records, once the first part has begun."""
    return records_folder(out) / str(json.loads((records_folder(out) / "plan.json").read_text())["id"])


@pytest.mark.parametrize("num_parts", [1, 2, 5, 40])
def test_parts_in_any_order_give_the_bytes_of_one_pack(
    num_parts: int, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for number in random.Random(num_parts).sample(range(1, num_parts + 1), num_parts):
        assert pack_part(source, out, f"{number}/{num_parts}").code == 0
        assert not out.exists()
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_tensors_that_share_sectors_go_to_one_part(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config(), num_shards=2)
    assert reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "whole").code == 0
    for number in (3, 1, 2):
        assert pack_part(tmp_path / "source", tmp_path / "out", f"{number}/3").code == 0
    assert reshard("commit", tmp_path / "out").code == 0
    assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


def test_parts_are_of_similar_size() -> None:
    file = LocalFile(Path("somewhere"))
    shards = [
        lay_out_shard(
            f"{stage}.safetensors",
            [
                TensorAt(name=f"{stage}.{number}", dtype="U8", shape=(nbytes,), file=file, begin=0, nbytes=nbytes)
                for number, nbytes in enumerate([8192, 100, 3996, 4096, 12288, 4096] * 5)
            ],
        )
        for stage in range(4)
    ]
    parts = partition(shards, 8)
    sizes = [sum(piece.nbytes for piece in part) for part in parts]
    assert max(sizes) - min(sizes) <= 2 * 12288
    pieces = [piece for part in parts for piece in part]
    assert sorted(name for piece in pieces for name in piece.names) == sorted(
        entry.name for shard in shards for entry in shard.entries
    )
    for stage in range(4):  # these two share a sector
        assert any({f"{stage}.1", f"{stage}.2"} <= piece.names for piece in pieces)
    assert sum(piece.has_start for piece in pieces) == 4


def test_steps_of_partition_grow_with_the_tensors_and_not_with_their_square() -> None:
    few, many = (_shard_of_sectors(num_tensors) for num_tensors in (4000, 16000))
    for shard in (few, many):
        (piece,) = partition([shard], 1)[0]
        assert len(piece.names) == len(shard.entries)
    assert steps_of(lambda: partition([many], 1)) < 4.5 * steps_of(lambda: partition([few], 1))


def _shard_of_sectors(num_tensors: int) -> OutputShard:
    """Return a shard of tensors that each fill sectors of their own, as a quantized layer's experts do."""
    file = MemoryFile("source", b"")
    names = (f"model.layers.0.mlp.experts.{number}.w1" for number in range(num_tensors))
    return lay_out_shard("a", [TensorAt(name, "BF16", (64, 64), file, 0, 8192) for name in names])


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
    assert f"reshard pack {source} --layout pp=2 --out {out} --part 2/4" in refused.text
    for number in (2, 3):
        assert pack_part(source, out, f"{number}/4").code == 0
    assert reshard("commit", out).code == 0


@pytest.mark.parametrize("flags", [("--layout", "pp=4"), ("--dtype", "bf16"), ("--part", "2/3")], ids=" ".join)
def test_part_of_another_plan_is_refused(
    flags: tuple[str, ...], source: Path, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    assert pack_part(source, tmp_path / "out", "1/2").code == 0
    refused = refusal(*part_of(source, tmp_path / "out", "2/2", *flags))
    assert refused.found == (3, "output.other-plan", str(tmp_path / "out"))
    if "--dtype" in flags:
        wording(refused.text)


def test_same_part_twice_at_once_is_refused_and_others_are_not(
    source: Path, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    out = tmp_path / "out"
    assert pack_part(source, out, "1/2").code == 0
    with open(records_of(out) / "part-00001-of-00002.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = refusal(*part_of(source, out, "1/2"))
        assert refused.found == (3, "output.in-use", str(out))
        wording(refused.text)
        assert pack_part(source, out, "2/2").code == 0
        assert refusal("commit", out) == refused
    assert reshard("commit", out).code == 0


def test_whole_pack_and_parts_keep_out_of_each_others_way(
    source: Path, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    assert pack_part(source, out, "1/2").code == 0
    refused = refusal("pack", source, "--layout", "pp=2", "--out", out)
    assert refused.found == (3, "output.parts-waiting", str(out))
    wording(refused.text)
    folder = os.open(partial, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert refusal(*part_of(source, out, "2/2")).found[:2] == (3, "output.in-use")
    os.close(folder)
    assert pack_part(source, out, "2/2").code == 0
    assert reshard("commit", out).code == 0
    assert refusal(*part_of(source, out, "2/2")).found == (3, "output.exists", str(out))


def test_damaged_parts_are_not_committed_and_not_lost(
    source: Path, whole: dict[str, bytes], tmp_path: Path, wording: Callable[[str], None]
) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    shard = next(path for path in sorted(partial.rglob("*.safetensors")))
    os.truncate(shard, shard.stat().st_size - 1)
    refused = refusal("commit", out)
    assert refused.found == (3, "output.damaged-parts", str(shard))
    wording(refused.text)
    assert not out.exists()
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("num_removed", [0, 1, 3])
def test_commit_that_was_killed_before_it_cleared_up_ends(
    num_removed: int, is_there: bool, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The folder has its name. What it replaced has the name of the parts' work, and is as large as that."""
    out, flags = tmp_path / "out", ("--force",) if is_there else ()
    if is_there:
        write_model(tmp_path / "old", CONFIG, random_tensors(CONFIG, dtypes=["F32"], seed=1), num_shards=3)
        assert reshard("pack", tmp_path / "old", "--layout", "pp=2", "--out", out).code == 0
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part, *flags).code == 0
    _end_in(lambda: reshard("commit", out, *flags), num_removed)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [*[".out.partial"] * is_there, ".out.parts"]
    assert files_in(out) == whole
    assert reshard("commit", out, *flags).code == 0
    assert files_in(out) == whole
    assert list(tmp_path.glob(".*")) == []


def test_commit_without_what_the_parts_wrote_leaves_what_is_there(
    source: Path, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    out = tmp_path / "out"
    assert reshard("pack", source, "--layout", "pp=2", "--out", out).code == 0
    old = files_in(out)
    assert pack_part(source, out, "1/1", "--force").code == 0
    shutil.rmtree(tmp_path / ".out.partial")
    refused = refusal("commit", out, "--force")
    assert refused.found == (3, "output.damaged-parts", f"{tmp_path}/.out.partial")
    wording(refused.text)
    assert files_in(out) == old


def test_shards_of_another_pack_are_not_given_the_digests_of_this_one(
    source: Path, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    write_model(tmp_path / "old", CONFIG, random_tensors(CONFIG, dtypes=["F32"], seed=1), num_shards=3)
    assert reshard("pack", tmp_path / "old", "--layout", "pp=2", "--out", tmp_path / "other").code == 0
    assert pack_part(source, out, "1/1").code == 0
    for file in files_in(tmp_path / "other"):
        shutil.copy(tmp_path / "other" / file, partial / file)
    refused = refusal("commit", out)
    assert refused.found == (3, "output.damaged-parts", f"{partial}/model-00001-of-00002.safetensors")
    wording(refused.text)
    assert not out.exists()


def test_parts_wait_until_a_commit_that_was_killed_has_cleared_up(
    source: Path, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    out = tmp_path / "out"
    assert pack_part(source, out, "1/1").code == 0
    _end_in(lambda: reshard("commit", out), 1)
    old = files_in(out)
    again = ("pack", source, "--layout", "pp=1", "--out", out, "--force", "--part", "1/1")
    refused = refusal(*again)
    assert refused.found == (3, "output.unfinished-commit", str(out))
    wording(refused.text)
    assert reshard("commit", out).code == 0
    assert files_in(out) == old
    assert reshard(*again).code == 0
    assert reshard("commit", out, "--force").code == 0
    assert len(list(out.glob("model-*"))) == 1


@pytest.mark.parametrize("count", [0, 1, 400])
def test_header_whose_digests_were_cut_off_by_a_kill_is_written_again(
    count: int, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out, shard = tmp_path / "out", "model-00001-of-00002.safetensors"
    assert pack_part(source, out, "1/1").code == 0
    with open(tmp_path / ".out.partial" / shard, "r+b") as file:
        zeros = file.read(1 << 14).index(b"0" * 64)
        file.seek(zeros)
        file.write(whole[shard][zeros : zeros + count])
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole


@pytest.mark.parametrize("seed", range(10))
def test_parts_and_commit_killed_at_any_time_and_run_again_give_the_same_bytes(
    seed: int, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """A copy of this process packs, and is killed; it has everything imported, so that the kill hits the work."""
    out, dice = tmp_path / "out", random.Random(seed)
    for number in (1, 2, 3):
        _kill_after(dice.uniform(0, 0.06), partial(pack_part, source, out, f"{number}/3"))
        assert not out.exists()
        assert pack_part(source, out, f"{number}/3").code == 0
    _kill_after(dice.uniform(0, 0.02), lambda: reshard("commit", out))
    run("commit", out)
    assert files_in(out) == whole


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 50))])
def test_parts_finish_what_a_killed_part_left(
    seed: int, num_calls: int, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out, dice = tmp_path / "out", random.Random(seed)
    killed, after = 1 + seed % 3, int((seed * 7 % 50 + dice.random()) / 50 * num_calls * 0.9)  # in turn, spread evenly
    pids = {}
    for number in (1, 2, 3):
        work = partial(pack_part, source, out, f"{number}/3", "--take-over", "1")
        pids[number] = _begin(work, _claim(killed, 3), signal.SIGKILL, after) if number == killed else _begin(work)
    assert os.waitpid(pids.pop(killed), 0)[1] in (signal.SIGKILL, 0)  # 0: on a busy machine, others may be faster
    assert [os.waitpid(pid, 0)[1] for pid in pids.values()] == [0, 0]
    run("commit", out)
    assert files_in(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def num_calls(source: Path) -> int:
    """Return how many functions are called to write a part, once it is claimed."""
    out, found = source.parent / "counted", source.parent / "calls"
    pid = _begin(partial(pack_part, source, out, "3/3"), _claim(3, 3), counted=found)
    assert os.waitpid(pid, 0)[1] == 0
    return int(found.read_text())


def test_part_that_hangs_is_taken_over_and_does_no_harm_when_it_goes_on(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    hangs = _begin(partial(pack_part, source, out, "1/2"), _claim(1, 2), signal.SIGSTOP, after=200)
    assert os.WIFSTOPPED(os.waitpid(hangs, os.WUNTRACED)[1])
    ended = pack_part(source, out, "2/2", "--take-over", "1", "--json")
    assert (ended.code, ended.json["taken_over"]) == (0, [1])
    assert sorted(path.name for path in records_of(out).glob("*.claim-*") if "00001" in path.name) == [
        "part-00001-of-00002.claim-1",
        "part-00001-of-00002.claim-2",
    ]
    assert refusal("commit", out).found == (3, "output.in-use", str(out))
    os.kill(hangs, signal.SIGCONT)
    assert os.waitpid(hangs, 0)[1] == 0
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole


def test_parts_that_nobody_began_are_packed_by_those_that_are_done(
    source: Path, whole: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended = pack_part(source, tmp_path / "out", "2/3", "--take-over", "1")
    assert ended.code == 0
    assert "took over 3, 1" in ended.out
    assert [record.funcName for record in caplog.records if record.funcName != "_take_over"] == ["_write_lost"] * 2
    assert pack_part(source, tmp_path / "out", "3/3", "--take-over", "1", "--json").json["taken_over"] == []
    assert reshard("commit", tmp_path / "out").code == 0
    assert files_in(tmp_path / "out") == whole


def _claim(number: int, num_parts: int) -> str:
    """Return the name of a part's first claim."""
    return f"part-{number:05}-of-{num_parts:05}.claim-1"


def _begin(
    work: Callable[[], Ended], claim: str = "", sends: int = 0, after: int = 0, counted: Path | None = None
) -> int:
    """Do this in a copy of this process, which sends itself a signal so many calls of functions after this claim."""
    pid = os.fork()
    if pid == 0:
        code, num_calls = 1, 0

        def call(frame: object, event: str, argument: object) -> None:
            nonlocal num_calls, sends
            num_calls += 1
            if sends and num_calls > after:
                now, sends = sends, 0
                os.kill(os.getpid(), now)

        def begin(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and claim and str(arguments[0]).endswith(claim):
                threading.setprofile(call)
                sys.setprofile(call)

        try:
            sys.addaudithook(begin)
            code = work().code
        finally:
            sys.setprofile(None)
            if counted is not None:
                counted.write_text(str(num_calls))
            os._exit(code)
    return pid


def _end_in(work: Callable[[], object], num_removed: int) -> None:
    """Do this in a copy of this process, which ends when it has removed so many files of a folder."""
    assert _end_at(work, "unlink", lambda path: path.endswith((".safetensors", ".json", ".lock")), num_removed)


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


def _kill_after(seconds: float, work: Callable[[], object]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


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
        ((*SLURM, "--time", ""), "options.sbatch-argument", "--sbatch-arg"),
        ((*SLURM, "--partition", "a\nb"), "options.sbatch-argument", "--sbatch-arg"),
        (("--part", "1/4", "--out", "hf://org/name"), "options.parts-store", "--part"),
        (("--part", "1/4", "--out", "s3://b/p", "--force"), "options.conflict", "--force"),
        (("--take-over", "60"), "options.needs-part", "--take-over"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    flags: tuple[str, ...], code: str, where: str, source: Path, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    refused = refusal("pack", source, "--layout", "pp=2", "--out", tmp_path / "out", *flags)
    assert refused.found == (2, code, where)
    wording(refused.text)
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--layout", "pp=99"), (2, "layout.uneven-split", "layout")),
        (("--layout", "pp=2", "--out", "{place}/taken"), (3, "output.exists", "{place}/taken")),
        (("--layout", "pp=2", "--out", "{place}/file/out"), (3, "output.unwritable", "{place}/file/out")),
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


def test_source_that_is_not_there_is_not_submitted(tmp_path: Path) -> None:
    asked = ("--layout", "pp=2", "--out", tmp_path / "out", *SLURM, "--dry-run")
    assert refusal("pack", tmp_path / "absent", *asked).found[::2] == (3, f"{tmp_path}/absent")


def test_dry_run_prints_an_array_and_the_commit_that_waits_for_it(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "the out"
    asked = ("--parts", "8", "--scheduler", "slurm", "--account", "us", "--time", "1:00:00", "--sbatch-arg", "--mem=8G")
    said = reshard("pack", source, "--layout", "pp=2", "--out", out, "--no-sync", *asked, "--dry-run").out
    sbatch = "$ sbatch --parsable --account=us --time=1:00:00 --mem=8G"
    assert said.splitlines()[0] == sbatch
    assert f"{sbatch} --dependency=afterok:ARRAY_JOB_ID" in said.splitlines()
    assert said.count("#SBATCH --account=us\n#SBATCH --time=1:00:00\n#SBATCH --mem=8G\n") == 2
    assert "#SBATCH --array=1-8\n" in said
    again = f"-P -m reshard pack {source} --layout pp=2 --out '{out}' --no-sync"
    assert f'  {sys.executable} {again} --part "$SLURM_ARRAY_TASK_ID/8"\n' in said
    assert f"exec {sys.executable} -P -m reshard commit '{out}'\n" in said
    assert not out.parent.joinpath(".the out.partial").exists()


def test_parts_that_cannot_be_submitted_say_why(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reshard", "pack", str(source), "--layout", "pp=2"]
    command += ["--out", str(tmp_path / "out"), "--parts", "2", "--scheduler", "slurm", "--json"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30)
    assert json.loads(done.stdout)["error"]["where"] == "sbatch"


def test_commit_that_has_ended_says_so_when_it_is_run_again(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    out = tmp_path / "out"
    for number in (1, 2):
        run("pack", tmp_path / "source", "--layout", "pp=2", "--out", out, "--part", f"{number}/2")
    first = reshard("commit", out, "--json")
    before = files_in(out)
    for flags in ((), ("--force",)):
        again = reshard("commit", out, "--json", *flags)
        assert (again.code, again.out) == (0, first.out)
    assert files_in(out) == before
    nothing = reshard("commit", tmp_path / "nothing", "--json")
    assert (nothing.code, nothing.json["error"]["code"]) == (3, "output.no-parts")


def test_parts_whose_folder_was_removed_are_not_committed(source: Path, tmp_path: Path) -> None:
    """The rest of the parts would make a folder of the right names and lengths, with zeros."""
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    assert pack_part(source, out, "2/2").code == 0
    shutil.rmtree(partial)
    for flags in ((), ("--take-over", "1")):
        assert refusal(*part_of(source, out, "1/2", *flags)).found == (3, "output.damaged-parts", str(partial))
    assert refusal("commit", out).found == (3, "output.damaged-parts", str(partial))
    assert not out.exists()


@pytest.mark.parametrize("is_cut", [False, True])
def test_parts_that_wrote_to_a_shard_that_was_removed_or_cut_are_packed_again(
    is_cut: bool, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for part in ("1/3", "2/3", "3/3"):
        assert pack_part(source, out, part).code == 0
    shard = tmp_path / ".out.partial" / "model-00001-of-00002.safetensors"
    if is_cut:
        os.truncate(shard, shard.stat().st_size // 2)
    else:
        shard.unlink()
    assert pack_part(source, out, "1/3").code == 0
    assert refusal("commit", out).found == (3, "output.missing-parts", str(out))
    assert pack_part(source, out, "2/3", "--take-over", "1").code == 0
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole


@pytest.mark.parametrize("num_removed", [0, 1, 3])
def test_records_that_a_killed_commit_left_are_not_taken_for_those_of_new_parts(
    num_removed: int, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    _end_in(lambda: reshard("commit", out), num_removed)  # the plan is the first to go
    out.rename(tmp_path / "moved")
    if num_removed == 0:
        assert refusal(*part_of(source, out, "1/2")).found == (3, "output.damaged-parts", str(partial))
        return
    assert pack_part(source, out, "1/2").code == 0
    assert refusal("commit", out).found == (3, "output.missing-parts", str(out))
    assert pack_part(source, out, "2/2").code == 0
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole


def test_export_does_not_remove_parts_that_wait(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    assert reshard("pack", source, "--layout", "pp=2", "--out", other).code == 0
    assert pack_part(source, out, "2/2").code == 0
    refused = refusal("export", other, "--to", "hf", "--out", out)
    assert refused.found == (3, "output.parts-waiting", str(out))
    assert pack_part(source, out, "1/2").code == 0
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole


@pytest.mark.parametrize("num_removed", range(4))
@pytest.mark.parametrize("again", [0, 1, 2])
def test_commit_that_was_killed_twice_ends(
    num_removed: int, again: int, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    assert _end_at(lambda: reshard("commit", out), "unlink", lambda path: True, num_removed)
    assert _end_at(lambda: reshard("commit", out), "unlink", lambda path: True, again)
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_claims_with_a_gap_do_not_keep_a_part_from_being_claimed(
    source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert pack_part(source, out, "1/2").code == 0
    (records_of(out) / "part-00002-of-00002.claim-2").touch()
    assert pack_part(source, out, "2/2").code == 0
    assert (records_of(out) / "part-00002-of-00002.claim-3").exists()
    assert reshard("commit", out).code == 0
    assert files_in(out) == whole


def test_small_file_that_two_processes_copy_at_the_same_time_is_whole(tmp_path: Path) -> None:
    """A process that writes part 1 is paused in the file; another one takes the part over; the first continues."""
    target, data = FolderTarget(tmp_path, is_shared=True), b"{}" * 1000

    def make() -> Iterator[bytes]:
        target.copy("config.json", MemoryFile("config.json", data))
        yield data

    copied = target.copy("config.json", MadeFile("config.json", len(data), make))
    assert copied == target.copy("config.json", MemoryFile("config.json", data))
    assert files_in(tmp_path) == {"config.json": data}


@pytest.mark.parametrize("left", [(), ("part-1-of-2.lock", ".0123abcd"), ("commit.json",)], ids=len)
def test_records_of_parts_without_a_plan_do_not_keep_a_pack_out(left: tuple[str, ...], tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    out = tmp_path / "out"
    for _ in range(2):
        assert records_folder(out).parent == tmp_path
        records_folder(out).mkdir()
        for name in left:
            (records_folder(out) / name).touch()
        run("pack", tmp_path / "source", "--layout", "pp=2", "--out", out, "--force")
        assert leftovers(out) == ["out"]


def test_parts_that_wait_are_left_alone_by_a_pack(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    out = tmp_path / "out"
    command = ("pack", tmp_path / "source", "--layout", "pp=2", "--out", out)
    assert reshard(*command, "--part", "1/2").code == 0
    before = files_in(tmp_path)
    for flags in ((), ("--force",)):
        refused = reshard(*command, "--json", *flags)
        assert (refused.code, refused.json["error"]["code"]) == (3, "output.parts-waiting")
    assert files_in(tmp_path) == before
    assert reshard(*command, "--part", "2/2").code == 0
    assert reshard("commit", out).code == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_part_of_a_source_whose_small_files_changed_since_the_first_part_is_refused(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_model(source)
    command = ("pack", source, "--layout", "pp=2", "--out", out)
    assert reshard(*command, "--part", "1/2").code == 0
    (source / name).write_text((source / name).read_text() + "\n")
    refused = reshard(*command, "--part", "2/2", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (3, "output.other-plan")
    assert reshard("commit", out).code == 3
