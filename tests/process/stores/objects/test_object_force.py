"""`--force` in a bucket removes what a command of ours left unfinished, and nothing else: no finished output."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from manifests.errors import InputError
from manifests.invariants import MANIFEST_NAME
from stores.base import LOCK_NAME, PROGRESS_NAME
from stores.objects.output import open_output
from stores.objects.store import open_objects
from tests.bucket_sentinels import plant_objects
from tests.builders import Ended, files_in, llama_config, reshard, weights_path, write_model
from tests.builders import refusal as refusal_by
from tests.process.stores.objects.buckets import BUCKET, objects_in, url_of
from tests.refusals import refused
from tests.servers.s3 import Fault, MotoServer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "source"
    write_model(folder, llama_config(num_hidden_layers=4), num_shards=2)
    return folder


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    out = source.with_name("packed")
    assert reshard("pack", source, "--layout", "pp=2", "--out", out).code == 0
    return out


def export(packed: Path, name: str, *flags: str) -> Ended:
    return reshard("export", packed, "--to", "hf", "--out", url_of(name), "--json", *flags)


def pack(source: Path, name: str, *flags: str, layout: str = "pp=4") -> Ended:
    return reshard("pack", source, "--layout", layout, "--out", url_of(name), "--json", *flags)


def refusal(ended: Ended) -> tuple[int, str, str]:
    assert ended.code, "it was not refused"
    return ended.code, ended.json["error"]["code"], ended.json["error"]["where"]


def put(moto: MotoServer, key: str, data: bytes) -> None:
    moto.client().put_object(Bucket=BUCKET, Key=key, Body=data)


@pytest.mark.parametrize("owner", ["pack", "export", "others", "another program"])
def test_finished_output_is_not_replaced(moto: MotoServer, source: Path, packed: Path, owner: str) -> None:
    name = f"finished/{owner.replace(' ', '-')}"
    if owner == "pack":
        assert pack(source, name).code == 0
    elif owner == "export":
        assert export(packed, name).code == 0
    else:
        theirs = (
            files_in(source) if owner == "others" else {"manifest.json": b'{"name":"web app"}', "a.html": b"<html>"}
        )
        for path, data in theirs.items():
            put(moto, f"{name}/{path}", data)
    plant_objects(moto.client(), BUCKET, name)
    before = moto.objects(BUCKET, name)
    for ended in (pack(source, name), pack(source, name, "--force"), export(packed, name, "--force")):
        assert refusal(ended) == (3, "output.exists", url_of(name))
        assert "remove it first" in ended.json["error"]["hint"]
        assert moto.objects(BUCKET, name) == before


@pytest.mark.parametrize("again", ["same plan", "another plan", "export"])
def test_unfinished_output_with_objects_of_others_is_not_touched(
    moto: MotoServer, source: Path, packed: Path, again: str
) -> None:
    name = f"unfinished/{again.replace(' ', '-')}"
    moto.fail(Fault(method="PUT", address=f"{name}/{weights_path(3, 4)}", what="status", status=403, times=99))
    assert refusal(pack(source, name))[1] == "store.denied"
    moto.fail()
    assert LOCK_NAME in objects_in(moto, name)

    def rerun() -> Ended:
        if again == "export":
            return export(packed, name, "--force")
        if again == "same plan":
            return pack(source, name)
        return pack(source, name, "--force", layout="pp=2")

    put(moto, f"{name}/notes.txt", b"mine")
    before = moto.objects(BUCKET, name)
    assert refusal(rerun()) == (3, "output.foreign-file", url_of(name))
    assert moto.objects(BUCKET, name) == before
    moto.client().delete_object(Bucket=BUCKET, Key=f"{name}/notes.txt")
    ended = rerun()
    assert ended.code == 0, ended.out + ended.err
    num_shards = len([path for path in objects_in(moto, name) if path.endswith(".safetensors")])
    assert (LOCK_NAME in objects_in(moto, name), num_shards) == (False, 4 if again == "same plan" else 2)


def test_record_says_which_object_commits_an_output(moto: MotoServer, source: Path, packed: Path) -> None:
    outputs = {"last/pack": (MANIFEST_NAME, weights_path(3, 4)), "last/export": ("config.json", weights_path(1, 2))}
    for name, (last, shard) in outputs.items():
        moto.fail(Fault(method="PUT", address=f"{name}/{shard}", what="status", status=403, times=99))
        assert refusal(pack(source, name) if last == MANIFEST_NAME else export(packed, name))[1] == "store.denied"
        moto.fail()
        assert json.loads(objects_in(moto, name)[PROGRESS_NAME])["last"] == last


def killed(url: str, wanted: Collection[str], **options: bool) -> None:
    """Begin an output, write its first small file, and no more."""
    target = open_output(url, wanted=wanted, **options)
    target.put(min(wanted), b"{}")


def test_what_several_killed_writers_left_is_removed_by_the_next(moto: MotoServer) -> None:
    """The second was killed before it could remove anything of the first."""
    url = url_of("left")
    killed(url, {"a.txt", "manifest.json"})
    moto.fail(Fault(method="POST", address="?delete", what="status", status=403, times=99))
    with pytest.raises(InputError):
        open_output(url, force=True, wanted={"b.txt", "manifest.json"})
    moto.fail()
    assert objects_in(moto, "left").keys() == {"a.txt", LOCK_NAME, PROGRESS_NAME}
    with open_output(url, force=True, wanted={"c.txt", "manifest.json"}) as third:
        third.put("c.txt", b"{}")
        third.commit(b"{}")
    assert objects_in(moto, "left").keys() == {"c.txt", "manifest.json"}


def test_what_a_writer_sent_late_is_removed_as_the_next_one_commits(moto: MotoServer) -> None:
    url = url_of("sent-late")
    killed(url, {"a.txt", "b.txt", "manifest.json"})
    with open_output(url, force=True, wanted={"c.txt", "manifest.json"}) as second:
        put(moto, "sent-late/b.txt", b"on its way when the lock was taken over")
        second.put("c.txt", b"{}")
        second.commit(b"{}")
    assert objects_in(moto, "sent-late").keys() == {"c.txt", "manifest.json"}


def test_what_a_writer_sent_late_is_removed_as_the_next_one_is_interrupted(moto: MotoServer) -> None:
    url = url_of("sent-later")
    killed(url, {"a.txt", "b.txt", "manifest.json"})
    second = open_output(url, force=True, wanted={"c.txt", "manifest.json"})
    put(moto, "sent-later/b.txt", b"on its way when the lock was taken over")
    second.put("c.txt", b"{}")
    second.abort()  # as at an interrupt
    assert objects_in(moto, "sent-later") == {}


def test_checkpoint_whose_lock_cannot_be_removed_is_readable_and_finished(moto: MotoServer) -> None:
    url = url_of("locked")
    moto.fail(Fault(method="POST", address="?delete", what="status", status=403, times=99))
    with open_output(url, wanted={"manifest.json"}) as target:
        target.commit(b"{}")
    assert objects_in(moto, "locked").keys() == {"manifest.json", LOCK_NAME, PROGRESS_NAME}
    assert open_objects(url).names() == ("manifest.json",)
    assert refused(lambda: open_output(url, force=True)) == ("output.exists", url)


@pytest.mark.parametrize("name", ["step-100/manifest.json", f"step-100/{LOCK_NAME}"])
def test_unfinished_output_with_another_inside_is_refused(moto: MotoServer, name: str) -> None:
    first, wanted = f"inside-{len(name)}", {"config.json", "manifest.json"}
    url = url_of(first)
    killed(url, wanted)
    put(moto, f"{first}/{name}", b"theirs")
    before = objects_in(moto, first)
    assert refused(lambda: open_output(url, force=True, wanted=wanted)) == ("output.foreign-file", url)
    assert objects_in(moto, first) == before
    moto.client().delete_object(Bucket=BUCKET, Key=f"{first}/{name}")
    with open_output(url, force=True, wanted=wanted) as target:
        target.commit(b"{}")
    assert objects_in(moto, first).keys() == {"manifest.json"}


def test_export_never_removes_the_model_that_it_is_made_of(moto: MotoServer, tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_shards=2)
    for path, data in files_in(tmp_path / "source").items():
        put(moto, f"model/{path}", data)
    virtual = ("pack", url_of("model"), "--layout", "pp=2", "--virtual", "--out")
    for packed in (url_of("virtual"), str(tmp_path / "virtual")):
        assert reshard(*virtual, packed).code == 0
        for bucket in ("s3://checkpoints", "S3://checkpoints", "s3a://checkpoints", "s3://checkpoints/"):
            for end in ("model", "model/"):
                refusal_of = refusal_by("export", packed, "--to", "hf", "--out", f"{bucket}/{end}", "--force")
                assert refusal_of.found == (3, "output.overlaps-source", f"{bucket}/{end}")
        refusal_of = refusal_by("export", packed, "--to", "hf", "--out", f"{url_of('model')}/again", "--force")
        assert refusal_of.found == (2, "output.overlaps-source", "--out")
    assert objects_in(moto, "model") == files_in(tmp_path / "source")
