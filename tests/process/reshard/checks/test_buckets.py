"""`reshard check` and `reshard verify` on a bucket find what they find in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import reshard as api
from tests.builders import INDEX, files_in, llama_config, reshard, run, write_model
from tests.process.stores.objects.buckets import BUCKET, url_of
from tests.servers.s3 import MotoServer

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def problems(address: str | Path, *flags: str | Path) -> list[tuple[str, str]]:
    """Return the code and the place of each problem, below the prefix or folder."""
    ended = reshard("check", address, "--json", *flags)
    assert ended.code == (0 if ended.json["ok"] else 4), ended.err
    found = [(each["code"], each["where"]) for each in ended.json["problems"]]
    return [(code, where.removeprefix(f"{address}/").partition(":")[0]) for code, where in found]


def test_checkpoints_in_a_bucket_are_checked_and_compared(moto: MotoServer, tmp_path: Path) -> None:
    write_model(tmp_path / "model", llama_config(), num_shards=3)
    client = moto.client()
    for name, data in files_in(tmp_path / "model").items():
        client.put_object(Bucket=BUCKET, Key=f"check/{name}", Body=data)
    assert problems(url_of("check"), "--against", tmp_path / "model", "--bytes") == []
    values = problems(url_of("check"), "--values")  # random bytes: some of them are NaN
    assert values == problems(tmp_path / "model", "--values")
    assert values != []
    assert reshard("check", url_of("check"), "--digests", "write", "--json").refusal[:2] == (3, "output.unwritable")
    stray = (tmp_path / "model" / SHARDS[0]).read_bytes()
    client.put_object(Bucket=BUCKET, Key="check/more.safetensors", Body=stray)
    client.delete_object(Bucket=BUCKET, Key=f"check/{SHARDS[1]}")
    cut = (tmp_path / "model" / SHARDS[2]).read_bytes()[:-7]
    client.put_object(Bucket=BUCKET, Key=f"check/{SHARDS[2]}", Body=cut)
    assert problems(url_of("check")) == [
        ("check.missing-shard", INDEX),
        ("header.wrong-data-length", SHARDS[2]),
        ("check.override", "more.safetensors"),
    ]
    nothing = reshard("check", url_of("nothing"), "--json")
    assert nothing.refusal == (3, "source.nothing-to-check", url_of("nothing"))


SHARD, CONFIG, CHAT = "model-00001-of-00002.safetensors", "config.json", "chat_template.jinja"


def places(manifest: str | Path, source: Path) -> list[str]:
    """Return where a verification finds differences, below the prefix or folder."""
    findings = api.verify(manifest, against=source).differences
    return [str(finding.where).removeprefix(f"{manifest}/") for finding in findings]


def test_files_that_a_bucket_lacks_are_findings(moto: MotoServer, tmp_path: Path) -> None:
    source, folder, url = tmp_path / "model", tmp_path / "packed", url_of("verified")
    write_model(source, llama_config())
    run("pack", source, "--layout", "pp=2", "--out", folder)
    for name, data in files_in(folder).items():
        moto.client().put_object(Bucket=BUCKET, Key=f"verified/{name}", Body=data)
    assert places(url, source) == []
    shutil.copyfile(source / CONFIG, source / CHAT)
    assert places(url, source) == places(folder, source) == [CHAT]
    for name in (CONFIG, INDEX):
        moto.client().delete_object(Bucket=BUCKET, Key=f"verified/{name}")
        (folder / name).unlink()
        assert places(url, source) == places(folder, source)
    moto.client().delete_object(Bucket=BUCKET, Key=f"verified/{SHARD}")
    (folder / SHARD).unlink()
    assert places(url, source) == places(folder, source)
    assert {SHARD, CONFIG, INDEX, CHAT} <= set(places(folder, source))
