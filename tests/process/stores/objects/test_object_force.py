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


@pytest.mark.parametrize("owner", ["others", "export"])
def test_forced_export_replaces_no_model(moto: MotoServer, source: Path, packed: Path, owner: str) -> None:
    name = f"models/{owner}"
    if owner == "export":
        assert export(packed, name).code == 0
    else:
        for path, data in files_in(source).items():
            put(moto, f"{name}/{path}", data)
    plant_objects(moto.client(), BUCKET, name)
    before = moto.objects(BUCKET, name)
    unforced = export(packed, name)
    assert refusal(unforced) == (3, "output.exists", url_of(name))
    assert "--force" not in unforced.json["error"]["hint"]  # which would not be accepted
    assert refusal(export(packed, name, "--force")) == (3, "output.not-ours", url_of(name))
    assert moto.objects(BUCKET, name) == before


def test_forced_pack_replaces_no_output_with_objects_of_others(moto: MotoServer, source: Path) -> None:
    name = "foreign/bundles"
    assert pack(source, name).code == 0
    put(moto, f"{name}/config.json", b"{}")
    before = moto.objects(BUCKET, name)
    plant_objects(moto.client(), BUCKET, name)
    planted = moto.objects(BUCKET, name)
    assert refusal(pack(source, name, "--force")) == (3, "output.foreign-file", url_of(name))
    assert moto.objects(BUCKET, name) == planted
    for key in planted.keys() - before.keys():
        if key.startswith(f"{name}/"):
            moto.client().delete_object(Bucket=BUCKET, Key=key)
    assert pack(source, name, "--force").code == 0


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
