"""A pack in parts to a bucket: processes each write some of the shards, and a commit lists them all."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from stores.base import PROGRESS_NAME
from tests.builders import Ended, files_in, llama_config, random_tensors, reshard, weights_path, write_model
from tests.process.stores.objects.buckets import BUCKET, objects_in, url_of
from tests.servers.s3 import Fault, MotoServer

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "source"
    config = llama_config(hidden_size=256, intermediate_size=512, vocab_size=2000)
    write_model(folder, config, random_tensors(config), num_shards=2)
    (folder / "empty.txt").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    return pack_here(source, source.with_name("packed"))


def pack_here(source: Path, out: Path) -> Path:
    assert reshard("pack", source, "--layout", "pp=4", "--out", out).code == 0
    return out


def arguments(source: Path, name: str, part: str, *more: str) -> tuple[str, ...]:
    return ("pack", str(source), "--layout", "pp=4", "--out", url_of(name), "--part", part, *more)


def pack(source: Path, name: str, part: str, *more: str) -> Ended:
    return reshard(*arguments(source, name, part, *more))


def begin(source: Path, name: str, part: str, *more: str) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "reshard", *arguments(source, name, part, *more))
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def names_in(client: Any, name: str) -> list[str]:
    return [each["Key"] for each in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{name}/").get("Contents", ())]


def wait_for(moto: MotoServer, name: str, end: str, *processes: subprocess.Popen[bytes]) -> None:
    """Wait until there is an object whose name ends so."""
    deadline, client = time.monotonic() + 60, moto.client()
    while not any(path.endswith(end) for path in names_in(client, name)):
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check(moto: MotoServer, name: str, source: Path, packed: Path, *, was_killed: bool = False) -> None:
    """Check that a committed prefix is the pack in a folder, with its shards elsewhere, and nothing more.

    An upload that was killed stays until a rule of the bucket removes it: nothing lists it.
    """
    found, expected = objects_in(moto, name), files_in(packed)
    shards = {path.rpartition("/")[2]: data for path, data in found.items() if path.endswith(".safetensors")}
    assert shards == {path: data for path, data in expected.items() if path.endswith(".safetensors")}
    others = {path for path in found if not path.endswith(".safetensors")}
    assert others == {path for path in expected if not path.endswith(".safetensors")}
    assert found["config.json"] == expected["config.json"]
    left = moto.uploads(BUCKET, f"{name}/")
    assert left == [] or (was_killed and all(path.startswith(f"{name}/parts-") for path in left))
    assert reshard("verify", url_of(name), "--against", source).code == 0


def error_of(ended: Ended) -> Any:
    return (ended.code, ended.json["error"]["code"])


def test_parts_in_a_bucket_are_the_pack_in_a_folder(moto: MotoServer, source: Path, tmp_path: Path) -> None:
    source = shutil.copytree(source, tmp_path / "source")
    with open(source / "long.dat", "wb") as file:  # sent in parts itself
        file.truncate(20 << 20)
    packed = pack_here(source, tmp_path / "packed")
    for part in ("3/3", "1/3"):
        assert pack(source, "parts", part).code == 0
        assert pack(source, "parts", part).code == 0  # done already
        assert reshard("plan", url_of("parts"), "--layout", "pp=1").code == 3
    refused = reshard("commit", url_of("parts"), "--json")
    assert error_of(refused) == (3, "output.missing-parts")
    assert "--part 2/3" in refused.json["error"]["hint"]
    assert pack(source, "parts", "2/3").code == 0
    assert reshard("commit", url_of("parts")).code == 0
    check(moto, "parts", source, packed)
    before = objects_in(moto, "parts")
    assert reshard("commit", url_of("parts")).code == 0
    assert pack(source, "parts", "2/3").code == 0  # as a pod that is started again
    assert objects_in(moto, "parts") == before
    assert reshard("pack", url_of("parts"), "--layout", "pp=4", "--out", tmp_path / "here").code == 0
    here, expected = files_in(tmp_path / "here"), files_in(packed)
    assert {path: here[path] for path in here if path.endswith(".safetensors")} == {
        path: data for path, data in expected.items() if path.endswith(".safetensors")
    }
    assert here["model.safetensors.index.json"] == expected["model.safetensors.index.json"]


def test_part_that_was_killed_keeps_the_shards_that_it_had_written(
    moto: MotoServer, source: Path, packed: Path
) -> None:
    last = weights_path(3, 4)
    moto.fail(Fault(method="PUT", address=last, what="status", status=503, times=10_000))
    worker = begin(source, "killed", "2/2")
    wait_for(moto, "killed", weights_path(2, 4), worker)
    wait_for(moto, "killed", PROGRESS_NAME, worker)
    time.sleep(1)
    worker.kill()
    worker.communicate(timeout=10)
    moto.fail()
    before = len(moto.requests("PUT", weights_path(2, 4)))
    assert [pack(source, "killed", part).code for part in ("2/2", "1/2")] == [0, 0]
    assert len(moto.requests("PUT", weights_path(2, 4))) == before
    assert reshard("commit", url_of("killed")).code == 0
    check(moto, "killed", source, packed, was_killed=True)


def test_part_that_is_run_again_while_its_first_owner_hangs_is_whole(
    moto: MotoServer, source: Path, packed: Path
) -> None:
    """A scheduler took the machine for lost. Whatever its process does when it continues, the bytes are the same."""
    last = weights_path(3, 4)
    moto.fail(Fault(method="PUT", address=last, what="status", status=503, times=10_000))
    worker = begin(source, "hung", "2/2")
    try:
        wait_for(moto, "hung", weights_path(2, 4), worker)
        worker.send_signal(signal.SIGSTOP)
        moto.fail()
        assert [pack(source, "hung", part).code for part in ("2/2", "1/2")] == [0, 0]
        worker.send_signal(signal.SIGCONT)
        worker.communicate(timeout=60)
        assert worker.returncode == 3
        assert reshard("commit", url_of("hung")).code == 0
        check(moto, "hung", source, packed, was_killed=True)
    finally:
        worker.kill()
        worker.communicate(timeout=10)


def test_other_plans_and_other_outputs_are_refused(moto: MotoServer, source: Path) -> None:
    assert reshard("pack", source, "--layout", "pp=2", "--out", url_of("old")).code == 0
    assert error_of(pack(source, "old", "1/2", "--json")) == (3, "output.exists")
    assert pack(source, "two", "1/2").code == 0
    assert error_of(pack(source, "two", "1/3", "--json")) == (3, "output.other-plan")
    assert error_of(reshard("commit", url_of("two"), "--force", "--json")) == (2, "options.conflict")
    assert error_of(reshard("commit", url_of("none"), "--json")) == (3, "output.no-parts")


def test_object_of_another_is_not_written_over(moto: MotoServer, source: Path) -> None:
    assert [pack(source, "foreign", part).code for part in ("1/2", "2/2")] == [0, 0]
    moto.client().put_object(Bucket=BUCKET, Key="foreign/config.json", Body=b"{}")
    refused = reshard("commit", url_of("foreign"), "--json")
    assert error_of(refused) == (3, "output.foreign-file")
    assert refused.json["error"]["where"] == url_of("foreign/config.json")
    assert objects_in(moto, "foreign")["config.json"] == b"{}"


def test_shard_that_another_wrote_over_is_not_committed(moto: MotoServer, source: Path) -> None:
    assert [pack(source, "meddled", part).code for part in ("1/2", "2/2")] == [0, 0]
    path, data = next((path, data) for path, data in objects_in(moto, "meddled").items() if path.endswith("tensors"))
    moto.client().put_object(Bucket=BUCKET, Key=f"meddled/{path}", Body=data[:-1] + bytes([data[-1] ^ 1]))
    refused = reshard("commit", url_of("meddled"), "--json")
    assert error_of(refused) == (3, "output.damaged-parts")
    assert refused.json["error"]["where"] == url_of(f"meddled/{path}")


@pytest.mark.parametrize(
    ("method", "address"),
    [
        pytest.param("PUT", "cut/config.json", marks=pytest.mark.slow),
        pytest.param("PUT", "cut/model.safetensors.index.json", marks=pytest.mark.slow),
        ("PUT", "cut/manifest.json"),
        ("POST", "?delete"),
    ],
)
def test_commit_that_was_cut_short_is_run_again(
    moto: MotoServer, source: Path, packed: Path, method: str, address: str
) -> None:
    for key in [f"cut/{path}" for path in objects_in(moto, "cut")]:
        moto.client().delete_object(Bucket=BUCKET, Key=key)
    assert [pack(source, "cut", part).code for part in ("1/2", "2/2")] == [0, 0]
    last = (method, address) if method == "PUT" else ("PUT", "cut/manifest.json")  # the removals come after it
    before = len(moto.requests(*last))
    moto.fail(Fault(method=method, address=address, what="status", status=503, times=10_000))
    command = (sys.executable, "-m", "reshard", "commit", url_of("cut"))
    worker = subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(moto.requests(*last)) == before:
        assert worker.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    worker.kill()
    worker.wait(10)
    moto.fail()
    assert reshard("commit", url_of("cut")).code == 0
    check(moto, "cut", source, packed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_parts_killed_at_random_and_run_again_are_committed(
    moto: MotoServer, source: Path, packed: Path, seed: int
) -> None:
    chance, name = random.Random(seed), f"random-{seed}"
    workers = [begin(source, name, f"{number}/3") for number in (1, 2, 3)]
    try:
        time.sleep(chance.uniform(0.2, 2.5))
        for worker in chance.sample(workers, 2):
            worker.kill()
        for worker in workers:
            worker.communicate(timeout=120)
        assert {worker.returncode for worker in workers} <= {-9, 0}
        assert [pack(source, name, f"{number}/3").code for number in (1, 2, 3)] == [0, 0, 0]
        assert reshard("commit", url_of(name)).code == 0
        check(moto, name, source, packed, was_killed=True)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate(timeout=10)


def test_what_a_pod_runs_packs_into_a_bucket_and_may_run_again(
    moto: MotoServer, source: Path, packed: Path, tmp_path: Path
) -> None:
    command, environment = pod(source, "pods", tmp_path)
    for index in ("1", "1", "0", "0"):
        done = subprocess.run(
            command, env={**environment, "JOB_COMPLETION_INDEX": index}, cwd=tmp_path, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    check(moto, "pods", source, packed)


def test_pod_that_is_evicted_tells_what_it_runs(moto: MotoServer, source: Path, tmp_path: Path) -> None:
    """A shell that is a pod's first process passes no signal on by itself."""
    last = weights_path(3, 4)
    moto.fail(Fault(method="PUT", address=last, what="status", status=503, times=10_000))
    command, environment = pod(source, "evicted", tmp_path)
    environment |= {"JOB_COMPLETION_INDEX": "1"}
    shell = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        wait_for(moto, "evicted", weights_path(2, 4), shell)
        shell.terminate()
        moto.fail()
        _, said = shell.communicate(timeout=60)  # its standard error ends once the worker has ended, too
        assert shell.returncode == 143, said
        assert moto.uploads(BUCKET, "evicted/") == []
    finally:
        moto.fail()
        shell.kill()
        shell.communicate(timeout=60)


def pod(source: Path, name: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return what each of two pods runs, and its environment but for its index."""
    asked = ("--parts", "2", "--scheduler", "job", "--image", "i", "--mount", f"c:{source.parent}")
    job = yaml.safe_load(reshard("pack", source, "--layout", "pp=4", "--out", url_of(name), *asked, "--dry-run").out)
    command = [word.replace("$$", "$") for word in job["spec"]["template"]["spec"]["containers"][0]["command"]]
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return command, {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
