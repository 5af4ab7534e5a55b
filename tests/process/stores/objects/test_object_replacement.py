"""A checkpoint in a bucket that `--force` replaces: what its manifest names goes; objects of others are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from manifests.codec import encode_manifest
from manifests.errors import InputError
from stores.base import LOCK_NAME, PROGRESS_NAME
from stores.objects.output import ObjectTarget, Wanted, open_output
from stores.objects.store import open_objects
from tests.builders import Ended, files_in, llama_config, refusal, reshard, write_model
from tests.fast.manifests.drawn_manifests import full_manifest
from tests.process.stores.objects.buckets import BUCKET, objects_in, url_of
from tests.refusals import refused
from tests.servers.s3 import Fault, MotoServer

SHARD = "stage-000/model.safetensors"
WANTED = Wanted(shards=[SHARD], small=["config.json", "manifest.json"])


def commit(target: ObjectTarget, data: bytes) -> None:
    """Write a shard and a small file, and the manifest that names them."""
    target.put("config.json", data)
    path = target.place(SHARD)
    target.writer(path, len(data), data).finish()
    full = full_manifest()
    first = replace(full.stages[0], shards=(replace(full.stages[0].shards[0], path=path),))
    target.commit(encode_manifest(replace(full, stages=(first, *full.stages[1:]))))


def put(moto: MotoServer, name: str, data: bytes = b"theirs") -> None:
    moto.client().put_object(Bucket=BUCKET, Key=name, Body=data)


def test_pack_that_replaces_a_manifest_removes_what_that_names(moto: MotoServer, tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config(tie_word_embeddings=True), num_shards=2)
    run, nested = url_of("run"), url_of("run/step-100")

    def pack(out: str, layout: str, *flags: str) -> Ended:
        return reshard("pack", tmp_path / "source", "--layout", layout, "--out", out, *flags)

    assert (pack(run, "pp=2").code, pack(nested, "pp=2").code) == (0, 0)
    before = objects_in(moto, "run")
    refused = pack(run, "pp=4", "--force", "--json")  # another checkpoint is in it
    assert (refused.code, refused.json["error"]["code"]) == (3, "output.foreign-file")
    assert objects_in(moto, "run") == before
    for layout in ("pp=4", "pp=1"):
        assert pack(nested, layout, "--force").code == 0
        objects = objects_in(moto, "run/step-100")
        assert len({key.partition("/")[0] for key in objects if key.endswith(".safetensors")}) == 1  # the last packed-…
        assert LOCK_NAME not in objects
    for out in (run, nested):
        assert reshard("verify", out, "--against", tmp_path / "source").code == 0


def test_what_a_killed_writer_left_of_its_own_is_removed_by_the_next(moto: MotoServer) -> None:
    url = url_of("left")
    with open_output(url, wanted=WANTED) as target:
        commit(target, b"first")
    killed = open_output(url, force=True, wanted=WANTED)
    vain = killed.place(SHARD)
    killed.writer(vain, 4, b"vain").finish()
    assert objects_in(moto, "left").keys() == {
        "config.json", "manifest.json", LOCK_NAME, PROGRESS_NAME, SHARD, vain
    }  # fmt: skip
    with open_output(url, force=True, wanted=WANTED) as target:
        commit(target, b"second")
    assert objects_in(moto, "left").keys() == {"config.json", "manifest.json", target.place(SHARD)}


def test_what_was_replaced_before_a_kill_is_removed_by_the_next(moto: MotoServer) -> None:
    url = url_of("unremoved")
    with open_output(url, wanted=WANTED) as target:
        commit(target, b"first")
    moto.fail(Fault(method="POST", address="?delete", what="status", status=403, times=99))
    with open_output(url, force=True, wanted=WANTED) as second:
        commit(second, b"second")
    moto.fail()
    assert objects_in(moto, "unremoved").keys() == {
        "config.json", "manifest.json", LOCK_NAME, PROGRESS_NAME, SHARD, second.place(SHARD)
    }  # fmt: skip
    assert open_objects(url).names()  # it can be read
    with open_output(url, force=True, wanted=WANTED):
        assert objects_in(moto, "unremoved").keys() == {
            "config.json", "manifest.json", LOCK_NAME, PROGRESS_NAME, second.place(SHARD)
        }  # fmt: skip
    assert objects_in(moto, "unremoved")["config.json"] == b"second"  # the third was not committed
    assert objects_in(moto, "unremoved").keys() == {
        "config.json", "manifest.json", second.place(SHARD)
    }  # fmt: skip


def test_small_files_that_came_before_a_manifest_that_never_did_are_removed_by_the_next_but_one(
    moto: MotoServer,
) -> None:
    """Killed as the new manifest was to be written, and its successor before it could remove anything."""
    url = url_of("early")
    with open_output(url, wanted=WANTED) as first:
        commit(first, b"first")
    moto.fail(Fault(method="PUT", address="early/manifest.json", what="status", status=403, times=99))
    with open_output(url, force=True, wanted=WANTED) as killed:
        killed.put("extra.txt", b"new")
        with pytest.raises(InputError):
            commit(killed, b"second")
    moto.fail(Fault(method="POST", address="?delete", what="status", status=403, times=99))
    with pytest.raises(InputError):
        open_output(url, force=True, wanted=WANTED)
    moto.fail()
    assert "extra.txt" in objects_in(moto, "early")
    with open_output(url, force=True, wanted=WANTED) as third:
        commit(third, b"third")
    assert objects_in(moto, "early").keys() == {"config.json", "manifest.json", third.place(SHARD)}


@pytest.mark.parametrize("name", ["step-100/manifest.json", f"step-100/{LOCK_NAME}"])
def test_unfinished_output_with_another_inside_is_refused(moto: MotoServer, name: str) -> None:
    first = f"inside-{len(name)}"
    url = url_of(first)
    open_output(url, wanted=WANTED).put("config.json", b"{}")  # and no more: it was killed
    put(moto, f"{first}/{name}")
    before = objects_in(moto, first)
    assert refused(lambda: open_output(url, force=True, wanted=WANTED)) == ("output.foreign-file", url)
    assert objects_in(moto, first) == before
    moto.client().delete_object(Bucket=BUCKET, Key=f"{first}/{name}")
    with open_output(url, force=True, wanted=WANTED) as target:
        commit(target, b"new")
    assert objects_in(moto, first).keys() == {SHARD, "config.json", "manifest.json"}


def test_export_never_removes_the_model_that_it_is_made_of(moto: MotoServer, tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_shards=2)
    for path, data in files_in(tmp_path / "source").items():
        put(moto, f"model/{path}", data)
    virtual = ("pack", url_of("model"), "--layout", "pp=2", "--virtual", "--out")
    for packed in (url_of("virtual"), str(tmp_path / "virtual")):
        assert reshard(*virtual, packed).code == 0
        for bucket in ("s3://checkpoints", "S3://checkpoints", "s3a://checkpoints", "s3://checkpoints/"):
            for end in ("model", "model/"):
                refused = refusal("export", packed, "--to", "hf", "--out", f"{bucket}/{end}", "--force")
                assert refused.found == (3, "output.overlaps-source", f"{bucket}/{end}")
        refused = refusal("export", packed, "--to", "hf", "--out", f"{url_of('model')}/again", "--force")
        assert refused.found == (2, "output.overlaps-source", "--out")
    assert objects_in(moto, "model") == files_in(tmp_path / "source")
