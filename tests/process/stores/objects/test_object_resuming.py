"""Outputs in a bucket that were left unfinished are resumed: what was completed is not sent again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reshard.archives.names import DATA_SUFFIX, METADATA_NAME
from stores.base import LOCK_NAME, PROGRESS_NAME
from tests.builders import Ended, files_in, llama_config, random_tensors, reshard, weights_path, write_model
from tests.process.stores.objects.buckets import BUCKET, objects_in, url_of
from tests.servers.s3 import Fault, MotoServer

ROOT = Path(__file__).parents[4]
LAST = weights_path(3, 4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "source"
    config = llama_config(hidden_size=256, intermediate_size=512, vocab_size=2000)
    write_model(folder, config, random_tensors(config), num_shards=2)
    return folder


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    out = source.with_name("packed")
    assert pack(source, out).code == 0
    return out


def pack(source: Path, out: Path | str, *more: str) -> Ended:
    return reshard("pack", source, "--layout", "pp=4", "--out", out, *more)


def sent(moto: MotoServer, name: str, suffix: str = ".safetensors") -> list[str]:
    """Give the shards that were sent, in order."""
    requests = moto.requests("PUT", f"/{name}/") + moto.requests("POST", f"/{name}/")
    return [request.path.partition(f"/{name}/")[2] for request in requests if request.path.endswith(suffix)]


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["same", "force"])
def test_refused_upload_keeps_completed_objects_and_the_same_command_resumes(
    moto: MotoServer, source: Path, packed: Path, force: tuple[str, ...]
) -> None:
    name = f"resumed{len(force)}"
    moto.fail(*(Fault(method=method, address=LAST, what="status", status=403, times=99) for method in ("PUT", "POST")))
    ended = pack(source, url_of(name), "--json")
    assert (ended.code, ended.json["error"]["code"]) == (3, "store.denied")
    assert url_of(name) in ended.json["error"]["hint"]
    assert reshard("verify", url_of(name)).code == 3
    assert moto.uploads(BUCKET, f"{name}/") == []
    before = len(sent(moto, name))
    moto.fail()
    assert pack(source, url_of(name), *force).code == 0
    again = sent(moto, name)[before:]
    assert 1 <= len(again) < 4
    assert LAST in again
    assert objects_in(moto, name) == files_in(packed)


def test_killed_pack_is_resumed_on_its_machine_without_force(moto: MotoServer, source: Path, packed: Path) -> None:
    url = url_of("dead")
    moto.fail(Fault(method="PUT", address=LAST, what="status", status=503, times=10_000))
    command = (sys.executable, "-m", "reshard", "pack", source, "--layout", "pp=4", "--out", url)
    worker = subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(json.loads(objects_in(moto, "dead").get(PROGRESS_NAME, '{"objects": {}}'))["objects"]) < 3:
        assert worker.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert pack(source, url, "--json").json["error"]["code"] == "output.unfinished"  # it is alive
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    moto.fail()
    before = len(sent(moto, "dead"))
    assert pack(source, url).code == 0
    assert sent(moto, "dead")[before:] == [LAST]
    assert objects_in(moto, "dead") == files_in(packed)


def test_interrupt_that_must_wait_for_the_store_says_so_and_a_second_one_ends_at_once(
    moto: MotoServer, source: Path, packed: Path
) -> None:
    url = url_of("waiting")
    moto.fail(Fault(method="PUT", address=LAST, what="status", status=503, times=10_000))
    command = (sys.executable, "-m", "reshard", "pack", source, "--layout", "pp=4", "--out", url)
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stderr=subprocess.PIPE) as worker:
        assert worker.stderr is not None
        try:
            deadline = time.monotonic() + 60
            while not any(path.endswith(LAST) for path in sent(moto, "waiting")):
                assert worker.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            worker.terminate()
            lines = iter(worker.stderr.readline, b"")
            assert any(line.startswith(b"waiting for") for line in lines)
            worker.terminate()  # as some schedulers do
            worker.send_signal(signal.SIGINT)
            assert worker.wait(60) == 130
        finally:
            worker.kill()
            moto.fail()
    assert pack(source, url).code == 0
    assert objects_in(moto, "waiting") == files_in(packed)


def test_export_whose_last_answer_is_lost_has_not_lost_what_is_resumed_from(moto: MotoServer, packed: Path) -> None:
    """The lock and the record of completed objects go in one request: a lock without a record resumes nothing."""
    moto.fail(Fault(method="POST", address="?delete", what="lost", status=403, times=99))
    assert reshard("export", packed, "--to", "hf", "--out", url_of("last-answer")).code == 3
    moto.fail()
    assert {LOCK_NAME, PROGRESS_NAME}.isdisjoint(objects_in(moto, "last-answer"))


def test_export_of_files_without_headers_is_resumed(moto: MotoServer, packed: Path) -> None:
    export = ("export", packed, "--to", "dcp", "--out", url_of("headless"))
    moto.fail(Fault(method="PUT", address=METADATA_NAME, what="status", status=403, times=99))
    assert reshard(*export, "--json").json["error"]["code"] == "store.denied"
    moto.fail()
    before = sent(moto, "headless", DATA_SUFFIX)
    assert before
    assert reshard(*export).code == 0
    assert sent(moto, "headless", DATA_SUFFIX) == before


def test_object_that_others_wrote_over_is_sent_again(moto: MotoServer, source: Path, packed: Path) -> None:
    moto.fail(Fault(method="PUT", address=LAST, what="status", status=403, times=99))
    assert pack(source, url_of("meddled")).code == 3
    moto.fail()
    first = weights_path(0, 4)
    data = files_in(packed)[first]
    moto.client().put_object(Bucket=BUCKET, Key=f"meddled/{first}", Body=data[:-1] + bytes([data[-1] ^ 1]))
    assert pack(source, url_of("meddled")).code == 0
    assert objects_in(moto, "meddled") == files_in(packed)


def test_another_plan_resumes_nothing(moto: MotoServer, source: Path) -> None:
    moto.fail(Fault(method="PUT", address=LAST, what="status", status=403, times=99))
    assert pack(source, url_of("other")).code == 3
    moto.fail()
    other = ("pack", source, "--layout", "pp=2", "--out", url_of("other"))
    refused = reshard(*other, "--json")
    assert (refused.code, refused.json["error"]["code"]) == (3, "output.unfinished")
    assert reshard(*other, "--force").code == 0
    found = objects_in(moto, "other")
    assert sorted(name for name in found if name.endswith(".safetensors")) == [
        weights_path(0, 2), weights_path(1, 2)
    ]  # fmt: skip
