"""`reshard verify` of a checkpoint in a bucket reports what is missing there, as it does of a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import reshard
from tests.builders import INDEX, files_in, llama_config, run, write_model
from tests.process.stores.objects.buckets import BUCKET, url_of
from tests.servers.s3 import MotoServer

SHARD, CONFIG, CHAT = "model-00001-of-00002.safetensors", "config.json", "chat_template.jinja"


def places(manifest: str | Path, source: Path) -> list[str]:
    """Return where a verification finds differences, below the prefix or folder."""
    findings = reshard.verify(manifest, against=source).differences
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
