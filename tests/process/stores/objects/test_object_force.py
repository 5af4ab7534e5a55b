"""`--force` in a bucket removes what reshard wrote there, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from stores.base import LOCK_NAME
from tests.bucket_sentinels import plant_objects
from tests.builders import Ended, files_in, llama_config, reshard, weights_path, write_model
from tests.process.stores.objects.buckets import BUCKET, objects_in, url_of
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


@pytest.mark.parametrize("change", ["model of others", "trained since", "record of others"])
def test_forced_export_replaces_no_model_that_it_did_not_write(
    moto: MotoServer, source: Path, packed: Path, change: str
) -> None:
    name = f"models/{change.replace(' ', '-')}"
    if change == "trained since":
        assert export(packed, name).code == 0
        shard = next(path for path in objects_in(moto, name) if path.endswith(".safetensors"))
        data = objects_in(moto, name)[shard]
        put(moto, f"{name}/{shard}", data[:-1] + bytes([data[-1] ^ 1]))
    else:
        for path, data in files_in(source).items():
            put(moto, f"{name}/{path}", data)
    if change == "record of others":
        record = f"models/.{name.rpartition('/')[2]}.exported.json"
        put(moto, record, b'{"format": "reshard-export", "version": 1, "exports": [3, {}, {"config.json": ""}]}')
    plant_objects(moto.client(), BUCKET, name)
    before = moto.objects(BUCKET, name)
    assert refusal(export(packed, name, "--force")) == (3, "output.not-ours", url_of(name))
    assert moto.objects(BUCKET, name) == before


def test_forced_command_replaces_no_output_with_objects_of_others(moto: MotoServer, source: Path, packed: Path) -> None:
    assert (export(packed, "foreign/model").code, pack(source, "foreign/bundles").code) == (0, 0)
    for name, command in (("model", export), ("bundles", pack)):
        put(moto, f"foreign/{name}/config.json", b"{}")
        before = moto.objects(BUCKET, f"foreign/{name}")
        plant_objects(moto.client(), BUCKET, f"foreign/{name}")
        planted = moto.objects(BUCKET, f"foreign/{name}")
        ended = command(packed, f"foreign/{name}", "--force")
        assert refusal(ended) == (3, "output.foreign-file", url_of(f"foreign/{name}"))
        assert moto.objects(BUCKET, f"foreign/{name}") == planted
        for key in planted.keys() - before.keys():
            if key.startswith(f"foreign/{name}/"):
                moto.client().delete_object(Bucket=BUCKET, Key=key)
        assert command(packed, f"foreign/{name}", "--force").code == 0
    assert objects_in(moto, "foreign/model") == files_in(source)


def test_forced_export_whose_shards_are_refused_leaves_the_old_one(
    moto: MotoServer, source: Path, packed: Path
) -> None:
    assert export(packed, "old").code == 0
    before = moto.objects(BUCKET, "old")
    for method, address in (("PUT", "old/model-"), ("POST", "?delete")):
        moto.fail(Fault(method=method, address=address, what="status", status=403, times=99))
        assert refusal(export(packed, "old", "--force"))[:2] == (3, "store.denied")
        moto.fail()
        left = moto.objects(BUCKET, "old")
        if address == "?delete":  # the claim itself could not be removed
            assert {key: left[key] for key in before} == before
            assert export(packed, "old", "--force").code == 0
            left = moto.objects(BUCKET, "old")
        assert left == before


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


def test_manifest_of_another_program_is_not_replaced(moto: MotoServer, source: Path, packed: Path) -> None:
    put(moto, "app/manifest.json", b'{"name":"web app"}')
    put(moto, "app/index.html", b"<html>")
    before = moto.objects(BUCKET, "app")
    assert refusal(pack(source, "app", "--force")) == (3, "output.not-ours", url_of("app"))
    assert refusal(export(packed, "app", "--force")) == (3, "output.not-ours", url_of("app"))
    assert moto.objects(BUCKET, "app") == before


def test_bundles_are_not_replaced_by_an_export_nor_an_export_by_bundles(
    moto: MotoServer, source: Path, packed: Path
) -> None:
    assert (pack(source, "bundles").code, export(packed, "exported").code) == (0, 0)
    before = moto.objects(BUCKET)
    assert refusal(export(packed, "bundles", "--force"))[:2] == (3, "output.not-ours")
    assert refusal(pack(source, "exported", "--force"))[:2] == (3, "output.not-ours")
    assert moto.objects(BUCKET) == before
