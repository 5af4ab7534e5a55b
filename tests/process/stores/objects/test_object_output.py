"""Checkpoints written into a bucket of a real S3 server: whole or unreadable, whatever happens to the writer."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import socket
import threading
from collections.abc import Collection

import pytest

from manifests.codec import encode_manifest
from reshard.tensors.lazy import MemoryFile
from stores.base import LOCK_NAME, PROGRESS_NAME, Blocks, read_whole
from stores.objects import output as object_output
from stores.objects.client import ObstoreClient, open_writable, remove_objects
from stores.objects.lock import new_lock
from stores.objects.output import ObjectTarget, open_output
from stores.objects.store import open_objects
from stores.objects.uplink import NUM_PARTS
from tests.fast.manifests.drawn_manifests import full_manifest
from tests.process.stores.objects.buckets import BUCKET, MIB, become, measured, problem, refusal, url_of
from tests.servers.s3 import Fault, MotoServer, Strike, strike

MANIFEST = encode_manifest(full_manifest())
CONFIG = b'{"architectures": []}'


def shard(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def write(target: ObjectTarget, name: str, data: bytes, header_nbytes: int = 4096) -> None:
    """Write an object as the engine does: its header, then blocks of 1 MiB through one buffer."""
    writer = target.writer(name, len(data), data[:header_nbytes])
    buffer = memoryview(bytearray(MIB + 8))
    for position in range(header_nbytes, len(data), MIB):
        piece = data[position : position + MIB]
        buffer[8 : 8 + len(piece)] = piece
        writer.write(buffer, 8, 8 + len(piece), position)
        buffer[:] = bytes(len(buffer))
    writer.finish()


def write_checkpoint(url: str, seed: int = 0, *, force: bool = False, nbytes: int = MIB) -> bytes:
    """Write a checkpoint of one stage, and give its shard."""
    data = shard(nbytes, seed)
    with open_output(url, force=force) as target:
        target.put("config.json", CONFIG)
        write(target, "stage-000/model.safetensors", data)
        target.commit(MANIFEST)
    return data


def test_what_is_written_reads_back(moto: MotoServer) -> None:
    large, small = shard(30 * MIB + 123), shard(5000, seed=1)  # several parts, and less than one
    with open_output(url_of("whole/1")) as target:
        target.put("config.json", CONFIG)
        write(target, "stage-000/model.safetensors", large)
        write(target, "stage-001/model.safetensors", small)
        target.commit(MANIFEST)
    expected = {
        "config.json": CONFIG,
        "manifest.json": MANIFEST,
        "stage-000/model.safetensors": large,
        "stage-001/model.safetensors": small,
    }
    assert moto.objects(BUCKET, "whole/") == {f"whole/1/{name}": data for name, data in expected.items()}
    folder = open_objects(url_of("whole/1"))
    assert {name: read_whole(folder.file(name)) for name in folder.names()} == expected
    assert moto.uploads(BUCKET, "whole/") == []


def test_nothing_is_readable_before_the_commit(moto: MotoServer) -> None:
    url = url_of("early")
    with open_output(url) as target:
        target.put("config.json", CONFIG)
        write(target, "stage-000/model.safetensors", shard(MIB))
        assert refusal(open_objects(url).names) == ("store.unfinished", url)
        assert refusal(lambda: open_objects(url).file("manifest.json")) == (
            "store.no-such-file",
            f"{url}/manifest.json",
        )
        target.commit(MANIFEST)
    assert open_objects(url).names() == ("config.json", "manifest.json", "stage-000/model.safetensors")


def test_interrupt_as_a_small_file_arrives_leaves_nothing(moto: MotoServer) -> None:
    def write_config() -> None:
        with open_output(url_of("interrupted")) as target:
            target.written()  # no request of its opening is left
            # Of two requests that `put` makes, the first of which looks at the lock, at the second.
            strike(moto.endpoint, Strike(pid=os.getpid(), act="SIGINT", at=1, is_done=True))
            target.put("config.json", CONFIG)

    with pytest.raises(KeyboardInterrupt):
        write_config()
    moto.settle()
    assert [request.path for request in moto.requests("PUT", "interrupted/config.json")] != []
    assert moto.objects(BUCKET, "interrupted/") == {}


def test_interrupt_while_a_small_file_is_sent_beside_leaves_nothing(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_removed, put = threading.Event(), ObstoreClient.put

    def remove_and_tell(client: ObstoreClient, names: Collection[str]) -> None:
        remove_objects(client, names)
        is_removed.set()

    def put_late(client: ObstoreClient, name: str, data: bytes) -> None:
        if name == "config.json":
            os.kill(os.getpid(), signal.SIGINT)
            is_removed.wait(1)
        put(client, name, data)

    def write_config() -> None:
        with open_output(url_of("beside")) as target:
            target.copy("config.json", Blocks(MemoryFile("config.json", CONFIG)))
            target.commit(MANIFEST)  # waits for it

    monkeypatch.setattr("stores.objects.output.remove_objects", remove_and_tell)
    monkeypatch.setattr(ObstoreClient, "put", put_late)
    with pytest.raises(KeyboardInterrupt):
        write_config()
    assert moto.objects(BUCKET, "beside/") == {}


@pytest.mark.usefixtures("moto")
def test_what_makes_a_folder_a_model_is_removed_first_and_the_lock_last(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[set[str]] = []
    monkeypatch.setattr(ObstoreClient, "remove", lambda client, names: turns.append(set(names)))
    marks, last = {"config.json", ".metadata", "manifest.json"}, {LOCK_NAME, PROGRESS_NAME}
    remove_objects(open_writable(url_of("removed")), sorted({"model.safetensors"} | marks | last))
    assert turns == [marks, {"model.safetensors"}, last]


def test_objects_that_came_before_the_lock_are_refused_and_kept(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, theirs = url_of("between"), {"between/config.json": b"theirs", "between/model.safetensors": b"theirs too"}

    def lock_of_the_later() -> bytes:  # listed before, created afterwards
        for key, data in theirs.items():
            moto.client().put_object(Bucket=BUCKET, Key=key, Body=data)
        return new_lock()

    monkeypatch.setattr(object_output, "new_lock", lock_of_the_later)

    def write_beside() -> None:
        with open_output(url, wanted=("model.safetensors", "config.json"), plan="plan") as target:
            write(target, "model.safetensors", shard(MIB))

    assert refusal(write_beside) == ("output.exists", url)
    assert moto.objects(BUCKET, "between/") == theirs


@pytest.mark.parametrize("last", ["manifest.json", "config.json"])
@pytest.mark.parametrize("ending", ["finished", "last written", "manifest written", "removed"])
def test_writer_that_ends_just_before_it_is_taken_over_keeps_what_it_has_finished(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch, last: str, ending: str
) -> None:
    """The first writer ends after the second has found its output unfinished, and before that has the lock."""
    name = f"ends/{ending.replace(' ', '-')}/{last}"
    url, wanted = url_of(name), {"model.safetensors", last}
    first = open_output(url, wanted=wanted, last=last)
    write(first, "model.safetensors", data := shard(MIB))

    def lock_of_the_second() -> bytes:
        if ending == "removed":
            first.abort()
        elif ending == "finished":
            first.commit(MANIFEST, last)
        else:  # its lock and its record are still there
            key = f"{name}/{last if ending == 'last written' else 'manifest.json'}"
            moto.client().put_object(Bucket=BUCKET, Key=key, Body=MANIFEST)
        return new_lock()

    monkeypatch.setattr(object_output, "new_lock", lock_of_the_second)
    if ending == "removed":
        with open_output(url, force=True, wanted=wanted) as second:
            write(second, "model.safetensors", data)
            second.commit(MANIFEST, last)
    else:
        assert refusal(lambda: open_output(url, force=True, wanted=wanted)) == ("output.exists", url)
    finished = last if ending != "manifest written" else "manifest.json"
    assert moto.objects(BUCKET, f"{name}/") == {f"{name}/model.safetensors": data, f"{name}/{finished}": MANIFEST}


def test_output_whose_writer_was_killed_before_it_removed_the_lock_is_taken_over(moto: MotoServer) -> None:
    url, wanted = url_of("killed-late"), {"config.json"}
    open_output(url, wanted=wanted, last="config.json").check_lock()  # the names are recorded
    moto.client().put_object(Bucket=BUCKET, Key="killed-late/config.json", Body=CONFIG)
    with open_output(url, force=True, wanted=wanted, last="config.json") as second:
        second.commit(MANIFEST, "config.json")
    assert moto.objects(BUCKET, "killed-late/") == {"killed-late/config.json": MANIFEST}


def test_second_writer_is_refused_until_the_first_has_ended(moto: MotoServer) -> None:
    url = url_of("contended")
    with open_output(url) as target:
        target.put("config.json", CONFIG)
        assert refusal(lambda: open_output(url)) == ("output.unfinished", url)
        said = problem(lambda: open_output(url))
        assert re.search(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\b", said)
        for shown in (f"{len(CONFIG)} bytes", socket.gethostname(), f"process {os.getpid()}", "--force"):
            assert shown in said
    write_checkpoint(url)


def test_writer_that_was_taken_over_commits_nothing_and_removes_nothing(moto: MotoServer) -> None:
    url = url_of("taken")
    first = open_output(url, wanted={"config.json"})
    first.put("config.json", b"of the first")
    second = write_checkpoint(url, seed=1, force=True)
    expected = {
        "taken/config.json": CONFIG,
        "taken/manifest.json": MANIFEST,
        "taken/stage-000/model.safetensors": second,
    }
    assert refusal(lambda: first.commit(MANIFEST))[0] == "store.no-such-file"
    first.abort()
    assert moto.objects(BUCKET, "taken/") == expected

    url = url_of("taken-twice")
    with open_output(url) as third:
        fourth = open_output(url, force=True)
        assert refusal(lambda: third.commit(MANIFEST)) == ("output.contended", url)
    fourth.commit(MANIFEST)
    assert moto.objects(BUCKET, "taken-twice/") == {"taken-twice/manifest.json": MANIFEST}


def test_writer_that_was_taken_over_writes_over_nothing(moto: MotoServer) -> None:
    url, data = url_of("late"), shard(MIB)
    first = open_output(url)
    late = first.writer("stage-000/model.safetensors", len(data), data)
    second = write_checkpoint(url, seed=1, force=True)
    for act in (late.finish, lambda: first.put("config.json", b"late"), first.writer("config.json", 1, b"l").finish):
        assert refusal(act) == ("store.no-such-file", f"{url}/{LOCK_NAME}")
    first.abort()
    assert moto.objects(BUCKET, "late/") == {
        "late/config.json": CONFIG,
        "late/manifest.json": MANIFEST,
        "late/stage-000/model.safetensors": second,
    }


@pytest.mark.parametrize("late", ["shard", "shard of another rank", "small file", "long file", "reused shard"])
def test_object_that_a_writer_had_on_its_way_as_it_was_taken_over_is_not_committed(moto: MotoServer, late: str) -> None:
    """It has as many bytes as the new one. Its writer looked at the lock before, and the network was slow."""
    url, name = url_of(f"on-its-way/{late.replace(' ', '-')}"), "model.safetensors"
    others, wanted = open_writable(url), {name, "manifest.json"}
    data = shard(MIB if late != "long file" else 9 * MIB)
    if late == "reused shard":
        first = open_output(url, wanted=wanted, plan="plan")
        write(first, name, data)
        first.abort()
        assert first.is_resumable
    upload = others.writer(name, len(data))
    upload.write(memoryview(shard(len(data), seed=1)), 0, len(data), 0)

    def write_second() -> None:
        with open_output(url, force=True, wanted=wanted, plan="plan") as second:
            if late == "shard":
                write(second, name, data)
                assert second.is_resumable  # so that it is recorded
            elif late == "reused shard":
                assert second.completed(name, len(data), 8) == data[:8]
            elif late == "shard of another rank":
                second.check_lock()  # names are recorded beside, and until then no object may appear
                others.writer(name, len(data)).write_all([data])
                second.note(name, len(data), others.look_up(name).etag)
            else:
                second.copy(name, Blocks(MemoryFile(name, data)))
            second.written()
            upload.finish()
            second.commit(MANIFEST)

    assert refusal(write_second) == ("output.contended", f"{url}/{name}")
    assert not [key for key in moto.objects(BUCKET, url.removeprefix(f"s3://{BUCKET}/")) if "manifest" in key]


def test_object_that_got_lost_is_missed_before_the_commit(moto: MotoServer) -> None:
    url = url_of("lost")
    with open_output(url) as target:
        target.put("config.json", CONFIG)
        moto.client().delete_object(Bucket=BUCKET, Key="lost/config.json")
        assert refusal(lambda: target.commit(MANIFEST)) == ("output.lost-object", f"{url}/config.json")
    assert moto.objects(BUCKET, "lost/") == {}


def test_stranger_and_wrong_bucket_are_refused_before_anything_is_written(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "s3://no-such-bucket/a"
    assert refusal(lambda: open_output(url)) == ("store.no-such-bucket", url)
    become(monkeypatch, moto.environment(moto.stranger))
    assert refusal(lambda: open_output(url_of("denied"))) == ("store.denied", url_of("denied"))
    assert moto.objects(BUCKET, "denied") == {}


def test_store_without_conditional_writes_still_refuses_what_is_there(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    url = url_of("unconditional")
    write_checkpoint(url)
    assert refusal(lambda: open_output(url)) == ("output.exists", url)
    assert LOCK_NAME not in "".join(moto.objects(BUCKET, "unconditional/"))


def test_store_that_has_no_conditional_writes_is_told_how_to_be_used(moto: MotoServer) -> None:
    moto.fail(Fault(method="PUT", address=LOCK_NAME, what="status", status=501, times=99))
    assert refusal(lambda: open_output(url_of("unsupported"))) == (
        "store.refused",
        f"{url_of('unsupported')}/{LOCK_NAME}",
    )
    assert "AWS_CONDITIONAL_PUT=disabled" in problem(lambda: open_output(url_of("unsupported")))


@pytest.mark.parametrize(("method", "address"), [("PUT", "partNumber=2"), ("POST", "uploadId="), ("POST", "uploads=")])
def test_upload_that_the_store_refuses_is_aborted(moto: MotoServer, method: str, address: str) -> None:
    url = url_of("refused")
    moto.fail(Fault(method=method, address=address, what="status", status=403))

    def upload() -> None:
        with open_output(url) as target:
            write(target, "stage-000/model.safetensors", shard(40 * MIB))

    assert refusal(upload) == ("store.denied", f"{url}/stage-000/model.safetensors")
    assert moto.uploads(BUCKET, "refused/") == []
    assert moto.objects(BUCKET, "refused") == {}


def test_write_whose_answer_is_lost_is_known_to_be_ours(moto: MotoServer) -> None:
    moto.fail(
        Fault(method="PUT", address=f"answerless/{LOCK_NAME}", what="lost"),
        Fault(method="PUT", address="answerless/manifest.json", what="lost"),
    )
    data = write_checkpoint(url_of("answerless"))
    assert moto.objects(BUCKET, "answerless/") == {
        "answerless/config.json": CONFIG,
        "answerless/manifest.json": MANIFEST,
        "answerless/stage-000/model.safetensors": data,
    }
    assert [request.status for request in moto.requests("PUT", "answerless/manifest.json")] == [503, 412]


def test_commit_without_any_answer_removes_nothing(moto: MotoServer) -> None:
    moto.fail(Fault(method="PUT", address="undecided/manifest.json", what="lost", status=403))
    assert refusal(lambda: write_checkpoint(url_of("undecided"))) == (
        "store.denied",
        f"{url_of('undecided')}/manifest.json",
    )
    names = ("config.json", "manifest.json", "stage-000/model.safetensors")
    assert open_objects(url_of("undecided")).names() == names  # it had taken place


def test_written_memory_does_not_grow_with_the_object(moto: MotoServer) -> None:
    nbytes = 64 * MIB
    peak_nbytes, digest = measured("write", url_of("long"), "file", nbytes)
    (key,) = [key for key in moto.objects(BUCKET, "long/") if key.endswith("/file")]
    assert hashlib.sha256(moto.objects(BUCKET, key)[key]).hexdigest() == digest
    assert peak_nbytes < (8 * (NUM_PARTS + 1) + 24) * MIB  # parts, and Python
    assert json.loads(moto.objects(BUCKET, "long/manifest.json")["long/manifest.json"]) == {}
