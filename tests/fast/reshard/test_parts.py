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
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from reshard.operations.pack import parts_of
from reshard.plans.pack_plan import lay_out_shard
from reshard.plans.partition import deal
from stores.bundles import TensorAt
from stores.local import LocalFile
from tests.builders import Ended, files_in, leftovers, llama_config, random_tensors, reshard, write_model

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


def pack_part(source: Path, out: Path, part: str, *flags: str) -> Ended:
    return reshard("pack", source, "--layout", "pp=2", "--out", out, "--part", part, *flags)


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


def test_shards_are_cut_into_shares_of_like_size() -> None:
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
    shares = deal(shards, 8)
    sizes = [sum(share.nbytes for share in held) for held in shares]
    assert max(sizes) - min(sizes) <= 2 * 12288
    dealt = [name for held in shares for share in held for name in share.names]
    assert sorted(dealt) == sorted(entry.name for shard in shards for entry in shard.entries)
    for stage in range(4):  # these two share a sector
        assert any({f"{stage}.1", f"{stage}.2"} <= share.names for held in shares for share in held)
    assert sum(share.has_start for held in shares for share in held) == 4


def test_missing_parts_are_named_with_the_command_that_packs_one(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "no parts of a pack" in reshard("commit", out).err
    for number in (1, 4):
        assert pack_part(source, out, f"{number}/4").code == 0
    ended = reshard("commit", out)
    assert ended.code == 3
    assert "parts 2, 3 of 4 are not done" in ended.err
    assert f"run reshard pack {source} --layout pp=2 --out {out} --part 2/4" in ended.err
    for number in (2, 3):
        assert pack_part(source, out, f"{number}/4").code == 0
    assert reshard("commit", out).code == 0


@pytest.mark.parametrize("flags", [("--layout", "pp=4"), ("--dtype", "bf16"), ("--part", "2/3")], ids=" ".join)
def test_part_of_another_plan_is_refused(flags: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    assert pack_part(source, tmp_path / "out", "1/2").code == 0
    ended = pack_part(source, tmp_path / "out", "2/2", *flags)
    assert ended.code == 3
    assert "of another plan" in ended.err


def test_same_part_twice_at_once_is_refused_and_others_are_not(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack_part(source, out, "1/2").code == 0
    with open(tmp_path / ".out.parts" / "part-00001-of-00002.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = pack_part(source, out, "1/2")
        assert ended.code == 3
        assert "another process has part 1/2" in ended.err
        assert pack_part(source, out, "2/2").code == 0
        assert "another process has part 1/2" in reshard("commit", out).err
    assert reshard("commit", out).code == 0


def test_whole_pack_and_parts_keep_out_of_each_others_way(source: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    assert pack_part(source, out, "1/2").code == 0
    assert "parts of a pack" in reshard("pack", source, "--layout", "pp=2", "--out", out).err
    folder = os.open(partial, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert "another process is writing it" in pack_part(source, out, "2/2").err
    os.close(folder)
    assert pack_part(source, out, "2/2").code == 0
    assert reshard("commit", out).code == 0
    assert "exists already" in pack_part(source, out, "2/2").err


def test_damaged_parts_are_not_committed_and_not_lost(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    for part in ("1/2", "2/2"):
        assert pack_part(source, out, part).code == 0
    shard = next(path for path in sorted(partial.rglob("*.safetensors")))
    os.truncate(shard, shard.stat().st_size - 1)
    ended = reshard("commit", out)
    assert ended.code == 3
    assert str(shard) in ended.err
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


def test_commit_without_what_the_parts_wrote_leaves_what_is_there(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert reshard("pack", source, "--layout", "pp=2", "--out", out).code == 0
    old = files_in(out)
    assert pack_part(source, out, "1/1", "--force").code == 0
    shutil.rmtree(tmp_path / ".out.partial")
    ended = reshard("commit", out, "--force")
    assert ended.code == 3
    assert ended.err == (
        f"error: {tmp_path}/.out.partial: what the parts wrote is gone\n"
        f"hint: remove {tmp_path}/.out.parts and run the parts again\n"
    )
    assert files_in(out) == old


def test_shards_of_another_pack_are_not_given_the_digests_of_this_one(source: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    write_model(tmp_path / "old", CONFIG, random_tensors(CONFIG, dtypes=["F32"], seed=1), num_shards=3)
    assert reshard("pack", tmp_path / "old", "--layout", "pp=2", "--out", tmp_path / "other").code == 0
    assert pack_part(source, out, "1/1").code == 0
    shutil.rmtree(partial)
    (tmp_path / "other").rename(partial)
    ended = reshard("commit", out)
    assert ended.code == 3
    assert f"{partial}/stage-000/model.safetensors: holds digests that no part of this pack found" in ended.err
    assert not out.exists()


def test_parts_wait_until_a_commit_that_was_killed_has_cleared_up(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pack_part(source, out, "1/1").code == 0
    _end_in(lambda: reshard("commit", out), 1)
    old = files_in(out)
    anew = ("pack", source, "--layout", "pp=1", "--out", out, "--force", "--part", "1/1")
    ended = reshard(*anew)
    assert ended.code == 3
    assert ended.err == (
        f"error: {out}: a commit was killed when this had its name already\n"
        f"hint: reshard commit {out} clears up after it\n"
    )
    assert reshard("commit", out).code == 0
    assert files_in(out) == old
    assert reshard(*anew).code == 0
    assert reshard("commit", out, "--force").code == 0
    assert len(list(out.glob("stage-*"))) == 1


@pytest.mark.parametrize("count", [0, 1, 400])
def test_header_whose_digests_were_cut_off_by_a_kill_is_written_again(
    count: int, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out, shard = tmp_path / "out", "stage-000/model.safetensors"
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
    ended = reshard("commit", out)
    assert ended.code == 0 or (out.exists() and "no parts" in ended.err), ended.err
    assert files_in(out) == whole


def _end_in(work: Callable[[], object], num_removed: int) -> None:
    """Do this in a copy of this process, which ends when it has removed so many files of a folder."""
    pid = os.fork()
    if pid == 0:
        remove = os.unlink

        def unlink(path: str, *rest: object, **where: int) -> None:
            nonlocal num_removed
            if str(path).endswith((".safetensors", ".json", ".lock")):
                if num_removed == 0:
                    os._exit(0)
                num_removed -= 1
            remove(path, *rest, **where)

        os.unlink = unlink  # type: ignore[assignment]
        work()
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--part", "0/4"), "expected I/N"),
        (("--part", "5/4"), "expected I/N"),
        (("--part", "first"), "expected I/N"),
        (("--part", "1/4", "--virtual"), "no bytes to divide"),
        (("--part", "1/4", "--parts", "4", "--scheduler", "slurm"), "leave one of the two out"),
        (("--parts", "4"), "needs --scheduler"),
        (("--scheduler", "slurm"), "needs --parts"),
        (("--account", "us"), "is for --scheduler slurm"),
        (("--parts", "4", "--scheduler", "slurm", "--sbatch-arg", "gpus"), "an option of sbatch"),
        (("--parts", "4", "--scheduler", "slurm", "--sbatch-arg", "--array=1-2"), "an array of our own"),
        (("--parts", "4", "--scheduler", "slurm", "--sbatch-arg", "--comment=don't"), "No closing quotation"),
        (("--parts", "4", "--scheduler", "slurm", "--sbatch-arg", "--comment=a b"), "expected one option"),
        (("--parts", "4", "--scheduler", "slurm", "--sbatch-arg", "--exclusive # x"), "expected one option"),
        (("--parts", "4", "--scheduler", "slurm", "--time", ""), "an option of sbatch, found '--time='"),
        (("--parts", "4", "--scheduler", "slurm", "--partition", "a\nb"), "an option of sbatch"),
        (("--sbatch-arg", "--mem=8G"), "error: --sbatch-arg: is for --scheduler slurm"),
        (("--part", "1/4", "--out", "s3://bucket/prefix"), "a bucket does not have"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    flags: tuple[str, ...], said: str, source: Path, tmp_path: Path
) -> None:
    ended = reshard("pack", source, "--layout", "pp=2", "--out", tmp_path / "out", *flags)
    assert ended.code == 2
    assert said in ended.err
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--layout", "pp=99"), "99"),
        (("--layout", "pp=2", "--out", "{place}/taken"), "{place}/taken: exists already"),
        (
            ("--layout", "pp=2", "--out", "{place}/file/out"),
            "{place}/file/out: cannot be written here: {place}/file is",
        ),
    ],
)
def test_pack_that_cannot_be_is_not_submitted(flags: tuple[str, ...], said: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").write_bytes(b"")
    (tmp_path / "file").write_bytes(b"")
    asked = ("--out", tmp_path / "out", "--parts", "2", "--scheduler", "slurm", "--dry-run")
    ended = reshard("pack", source, *asked, *(flag.format(place=tmp_path) for flag in flags))
    assert (ended.code, ended.out) == (2 if "pp=99" in flags else 3, "")
    assert said.format(place=tmp_path) in ended.err


def test_source_that_is_not_there_is_not_submitted(tmp_path: Path) -> None:
    asked = ("--layout", "pp=2", "--out", tmp_path / "out", "--parts", "2", "--scheduler", "slurm", "--dry-run")
    ended = reshard("pack", tmp_path / "absent", *asked)
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.startswith(f"error: {tmp_path}/absent: no such folder")


def test_commit_of_a_bucket_is_refused() -> None:
    ended = reshard("commit", "s3://bucket/pp2")
    assert ended.code == 2
    assert ended.err.startswith("error: OUT: parts meet in a folder, which a bucket does not have")


def test_dry_run_prints_an_array_and_the_commit_that_waits_for_it(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "the out"
    asked = ("--parts", "8", "--scheduler", "slurm", "--account", "us", "--time", "1:00:00", "--sbatch-arg", "--mem=8G")
    said = reshard("pack", source, "--layout", "pp=2", "--out", out, "--no-sync", *asked, "--dry-run").out
    sbatch = "$ sbatch --parsable --account=us --time=1:00:00 --mem=8G"
    assert said.splitlines()[0] == sbatch
    assert f"{sbatch} --dependency=afterok:ARRAY_JOB_ID" in said.splitlines()
    assert said.count("#SBATCH --account=us\n#SBATCH --time=1:00:00\n#SBATCH --mem=8G\n") == 2
    assert "#SBATCH --array=1-8\n" in said
    again = f"-m reshard pack {source} --layout pp=2 --out '{out}' --no-sync"
    assert f'  {sys.executable} {again} --part "$SLURM_ARRAY_TASK_ID/8"\n' in said
    assert f"exec {sys.executable} -m reshard commit '{out}'\n" in said
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
        packed = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", out, "--part", f"{number}/2")
        assert packed.code == 0, packed.err
    first = reshard("commit", out, "--json")
    before = files_in(out)
    for flags in ((), ("--force",)):
        again = reshard("commit", out, "--json", *flags)
        assert (again.code, again.out) == (0, first.out)
    assert files_in(out) == before
    nothing = reshard("commit", tmp_path / "nothing", "--json")
    assert (nothing.code, nothing.json["error"]["code"]) == (3, "output.no-parts")


@pytest.mark.parametrize("left", [(), ("part-1-of-2.lock", ".0123abcd"), ("commit.json",)], ids=len)
def test_records_of_parts_without_a_plan_do_not_keep_a_pack_out(left: tuple[str, ...], tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    out = tmp_path / "out"
    for _ in range(2):
        assert parts_of(out).parent == tmp_path
        parts_of(out).mkdir()
        for name in left:
            (parts_of(out) / name).touch()
        packed = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", out, "--force")
        assert packed.code == 0, packed.err
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
