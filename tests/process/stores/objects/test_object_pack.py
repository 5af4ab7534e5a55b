"""The verbs on buckets of a real S3 server: what they write there is what they write here, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stores.base import LOCK_NAME, PROGRESS_NAME
from tests.builders import (
    files_in,
    llama_config,
    random_tensors,
    reshard,
    without_digest,
    write_model,
)
from tests.fast.reshard.transforms.adapters import write_adapter
from tests.process.stores.objects.buckets import BUCKET, MIB, measured, objects_in, url_of
from tests.servers.s3 import Fault, MotoServer

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model of 30 MiB in three files: some of its shards are sent in several parts."""
    folder = tmp_path_factory.mktemp("models") / "source"
    config = llama_config(hidden_size=512, intermediate_size=1536, vocab_size=8000, tie_word_embeddings=True)
    write_model(folder, config, random_tensors(config), num_shards=3)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 190 MiB in one file, which takes a while to send."""
    folder = tmp_path_factory.mktemp("models") / "large"
    config = llama_config(hidden_size=1024, intermediate_size=4096, vocab_size=16000)
    write_model(folder, config, random_tensors(config))
    return folder


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    out = source.with_name("packed")
    assert run("pack", source, "--layout", "pp=2", "--out", out)
    return out


def run(*args: str | Path, code: int = 0) -> str:
    """Run the command, and give what it said."""
    ended = reshard(*args)
    assert ended.code == code, ended.err
    return ended.out + ended.err


def upload(moto: MotoServer, folder: Path, name: str) -> str:
    for path, data in files_in(folder).items():
        moto.client().put_object(Bucket=BUCKET, Key=f"{name}/{path}", Body=data)
    return url_of(name)


def without_origin(files: dict[str, bytes]) -> dict[str, object]:
    """Return files with the manifest as a document, less what says where its source lay."""
    document = json.loads(without_digest(files["manifest.json"]))
    for key in ("source", "parents"):
        del document[key]
    return {**files, "manifest.json": document}


def test_pack_in_a_bucket_is_the_pack_in_a_folder(moto: MotoServer, source: Path, packed: Path) -> None:
    said = run("pack", source, "--layout", "pp=2", "--out", url_of("packed"))
    assert url_of("packed/manifest.json") in said
    assert objects_in(moto, "packed") == files_in(packed)
    assert moto.uploads(BUCKET, "packed/") == []


def test_long_auxiliary_file_is_sent_in_parts(moto: MotoServer, tmp_path: Path) -> None:
    source, out = tmp_path / "source", url_of("carried")
    write_model(source, llama_config())
    with open(source / "long.dat", "wb") as file:
        file.truncate(20 * MIB + 1)
        file.write(b"first")
    run("pack", source, "--layout", "pp=1", "--out", out)
    assert objects_in(moto, "carried")["long.dat"] == (source / "long.dat").read_bytes()
    assert LOCK_NAME not in objects_in(moto, "carried")
    assert moto.uploads(BUCKET, "carried/") == []
    assert run("verify", out)


def test_checkpoint_goes_through_buckets_and_comes_back(
    moto: MotoServer, source: Path, packed: Path, tmp_path: Path
) -> None:
    model = upload(moto, source, "round/model")
    first, second = url_of("round/first"), url_of("round/second")
    run("pack", model, "--layout", "pp=2", "--out", first)
    assert without_origin(objects_in(moto, "round/first")) == without_origin(files_in(packed))
    run("pack", f"{first}/manifest.json", "--layout", "pp=4", "--out", second)
    run("pack", second, "--layout", "pp=2", "--out", tmp_path / "third")
    assert without_origin(files_in(tmp_path / "third")) == without_origin(files_in(packed))
    run("export", tmp_path / "third", "--to", "hf", "--out", tmp_path / "here")
    run("export", second, "--to", "hf", "--out", url_of("round/there"))
    assert files_in(tmp_path / "here") == objects_in(moto, "round/there") == files_in(source)


def test_merge_of_a_base_and_an_adapter_in_buckets_is_that_of_folders(moto: MotoServer, tmp_path: Path) -> None:
    write_model(tmp_path / "base", num_shards=2)
    adapter = write_adapter(tmp_path / "adapter")
    run("merge", tmp_path / "base", adapter, "--out", tmp_path / "out")
    base = upload(moto, tmp_path / "base", "merge/base")
    run("merge", base, upload(moto, adapter, "merge/adapter"), "--out", url_of("merge/out"))
    assert objects_in(moto, "merge/out") == files_in(tmp_path / "out")


def test_verbs_that_read_take_a_manifest_in_a_bucket(moto: MotoServer, source: Path, packed: Path) -> None:
    url = upload(moto, packed, "read")
    assert run("verify", url).endswith("all digests match the manifest\n")
    assert "not verified" in run("verify", f"{url}/manifest.json", "--quick")
    assert run("verify", url, "--against", source).endswith(f"all tensors equal those of {source}\n")
    assert run("verify", packed, "--against", url, "--stage", "1")
    assert run("inspect", url, "--tensors") == run("inspect", packed, "--tensors")
    assert json.loads(run("inspect", url, "--json")) == json.loads(run("inspect", packed, "--json"))
    assert "tensors are equal, 0 differ\n" in run("diff", url, source)
    assert run("plan", url) == run("plan", packed)


def test_virtual_bundles_lie_in_a_bucket_and_refer_to_one(
    moto: MotoServer, source: Path, packed: Path, tmp_path: Path
) -> None:
    model, url = upload(moto, source, "virtual/model"), url_of("virtual/packed")
    run("pack", model, "--layout", "pp=2", "--virtual", "--out", url)
    assert not [name for name in objects_in(moto, "virtual/packed") if name.startswith("stage-")]
    run("verify", url, "--against", source)
    run("pack", url, "--out", tmp_path / "real")
    run("pack", url, "--stages", "1", "--out", url_of("virtual/half"))
    run("pack", url_of("virtual/half"), "--out", url_of("virtual/real"))
    expected = without_origin(files_in(packed))
    assert without_origin(files_in(tmp_path / "real")) == expected
    assert without_origin(objects_in(moto, "virtual/real")) == expected
    upload(moto, source, "virtual/model")  # the same bytes, written again
    moto.client().put_object(Bucket=BUCKET, Key="virtual/model/model-00002-of-00003.safetensors", Body=b"changed")
    assert run("pack", url, "--out", tmp_path / "late", code=3).startswith(
        f"error: {model}/model-00002-of-00003.safetensors: expected "
    )
    assert not (tmp_path / "late").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(moto: MotoServer, large: Path) -> None:
    nbytes = (large / "model.safetensors").stat().st_size
    peak_nbytes, _ = measured("pack", str(large), url_of("large"), "--io-memory", "80MiB")
    assert moto.uploads(BUCKET, "large/") == []
    assert peak_nbytes < (80 + 24) * MIB < nbytes  # parts, and Python


def test_commit_that_was_refused_is_made_by_the_same_command(moto: MotoServer, source: Path, packed: Path) -> None:
    pack = ("pack", source, "--layout", "pp=2", "--out", url_of("uncommitted"))
    moto.fail(Fault(method="PUT", address="uncommitted/manifest.json", what="status", status=403))
    assert "manifest.json: access is denied (403)" in run(*pack, code=3)
    num_shards = len(moto.requests("PUT", "uncommitted/stage-")) + len(moto.requests("POST", "uncommitted/stage-"))
    run(*pack)
    assert objects_in(moto, "uncommitted") == files_in(packed)
    again = len(moto.requests("PUT", "uncommitted/stage-")) + len(moto.requests("POST", "uncommitted/stage-"))
    assert again == num_shards


def test_manifest_is_the_last_object_and_the_config_that_of_an_export(
    moto: MotoServer, source: Path, packed: Path
) -> None:
    run("pack", source, "--layout", "pp=2", "--out", url_of("order/packed"))
    run("export", packed, "--to", "hf", "--out", url_of("order/model"))
    log = [json.loads(line) for line in moto.log.read_text().splitlines()]
    for name, last in (("order/packed", "manifest.json"), ("order/model", "config.json")):
        changes = [each for each in log if f"/{name}/" in each["path"] and each["method"] in ("PUT", "POST")]
        names = [each["path"].partition(f"/{name}/")[2] for each in changes]
        written = [each for each in names if each != PROGRESS_NAME]  # a record may be late, and is then removed
        assert (written[0], written[-1], written.count(last)) == (LOCK_NAME, last, 1)


def test_source_is_read_once_where_digests_are_known_or_it_fits_into_memory_and_twice_where_not(
    moto: MotoServer, tmp_path: Path
) -> None:
    config = llama_config(hidden_size=256, intermediate_size=1024)
    write_model(tmp_path / "model", config, random_tensors(config))  # in one file, so that no gap is bridged
    run("pack", tmp_path / "model", "--layout", "pp=2", "--out", tmp_path / "packed")
    model = upload(moto, tmp_path / "model", "counted/model")
    manifest = upload(moto, tmp_path / "packed", "counted/packed")
    nbytes = (tmp_path / "model" / "model.safetensors").stat().st_size

    def read(*args: str) -> float:
        """Run the command, and give how often it read the weights."""
        before = len(moto.requests("GET", "counted/"))
        run(*args)
        sent = moto.requests("GET", "counted/")[before:]
        return sum(request.sent_nbytes for request in sent if request.path.endswith(".safetensors")) / nbytes

    for memory, times in (("640MB", 1), ("1MB", 2)):
        pack = ("pack", model, "--layout", "pp=1", "--out", url_of(f"counted/a{times}"), "--io-memory", memory)
        plan = json.loads(run(*pack, "--dry-run", "--json"))
        assert read(*pack) == pytest.approx(times, rel=0.04)
        assert plan["read_nbytes"] / nbytes == pytest.approx(times, rel=0.04)
    assert read("pack", manifest, "--out", url_of("counted/b")) == pytest.approx(1, rel=0.04)
    assert read("export", manifest, "--to", "hf", "--out", url_of("counted/c")) == pytest.approx(1, rel=0.04)
