"""A pack of the hub's files has what the hub lists of them, is refused, or says what it did not compare."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

from reshard.copy.engine import WriteOptions, write_shards
from reshard.packing.hub_sha256 import HubCheck
from reshard.packing.options import PackOptions
from reshard.packing.pack import prepare_pack
from reshard.packing.plan import LayoutRequest
from stores.net.retries import Retries
from tests.builders import HEAD, Ended, files_in, leftovers, llama_config, random_tensors, reshard, write_model
from tests.servers.hub import Hub, serve_hub, set_up

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    write_model(tmp_path / "source", num_shards=3)
    with serve_hub() as served:
        set_up(monkeypatch, served, tmp_path / "cache")
        served.push("org/tiny", files_in(tmp_path / "source"))
        yield served


def damage(served: Hub, source: Path) -> None:
    data = (source / SHARD).read_bytes()
    served.damage(hashlib.sha256(data).hexdigest(), len(data) - 1)


def pack(out: Path, *more: str) -> Ended:
    return reshard("pack", "hf://org/tiny", "--layout", "pp=2", "--out", out, "--json", *more)


def test_whole_pack_is_verified_against_the_hub_without_reading_again(served: Hub, tmp_path: Path) -> None:
    ended = pack(tmp_path / "out")
    assert ended.code == 0, ended.err
    assert (len(ended.json["hub_verified"]), ended.json["hub_unverified"]) == (3, [])
    assert (ended.json["num_threads"], ended.json["num_streams"] > 0) == (2, True)
    read = sum(request.nbytes for request in served.take_requests() if request.status == 206)  # not the headers
    assert read < sum(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))


def test_files_are_hashed_while_they_are_written(served: Hub, tmp_path: Path) -> None:
    config = llama_config(hidden_size=256, intermediate_size=512, vocab_size=2000)
    write_model(tmp_path / "large", config, random_tensors(config), num_shards=3)
    served.push("org/tiny", files_in(tmp_path / "large"))
    options = PackOptions(out=tmp_path / "out", layout=LayoutRequest(spec="pp=2"))
    prepared = prepare_pack("hf://org/tiny", options)
    nbytes = sum(shard.nbytes - shard.header_nbytes for shard in prepared.shards)
    with HubCheck(prepared.staged.checkpoint, prepared.shards, tmp_path, fetch=False) as check:
        begun = nbytes_read()
        write_shards(prepared.shards, tmp_path, WriteOptions(written=check.written))
        deadline = time.monotonic() + 20
        while nbytes_read() - begun < nbytes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = nbytes_read()
        assert len(check.finish().verified) == 3
        assert nbytes_read() - before < nbytes / 10


def nbytes_read() -> int:
    """Return what this process has read from files; what it receives from sockets is not counted."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_wrong_bytes_of_a_weight_file_are_refused_by_its_name_and_nothing_is_kept(served: Hub, tmp_path: Path) -> None:
    damage(served, tmp_path / "source")
    ended = pack(tmp_path / "out")
    assert ended.code == 3
    assert ended.json["error"]["code"] == "source.hub-digest"
    assert ended.json["error"]["where"] == f"hf://org/tiny/{SHARD}"
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize("flags", [("--virtual",), ("--stages", "0"), ("--dtype", "fp32"), ("--drop", HEAD)])
def test_files_that_are_read_in_part_are_said_to_be_unverified_unless_the_rest_is_asked_for(
    served: Hub, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    if "--drop" in flags:
        (tmp_path / "source/config.json").write_text(
            (tmp_path / "source/config.json").read_text().replace('embeddings": false', 'embeddings": true')
        )
        served.push("org/tiny", files_in(tmp_path / "source"))
    ended = pack(tmp_path / "out", *flags)
    assert ended.code == 0, ended.err
    assert ended.json["hub_unverified"]
    assert "hub" in ended.err
    assert pack(tmp_path / "whole", *flags, "--verify-source").json["hub_unverified"] == []
    damage(served, tmp_path / "source")
    refused = pack(tmp_path / "damaged", *flags, "--verify-source")
    assert (refused.code, refused.json["error"]["code"]) == (3, "source.hub-digest")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_wrong_bytes_of_a_small_file_are_refused(served: Hub, tmp_path: Path, name: str) -> None:
    data = (tmp_path / "source" / name).read_bytes()
    served.fail(f"resolve-cache/.*{name}", times=9, body=data.replace(b"1", b"2").replace(b"u0000", b"u0001"))
    ended = pack(tmp_path / "out")
    assert (ended.code, ended.json["error"]["code"]) == (3, "source.hub-digest")
    assert ended.json["error"]["where"] == f"hf://org/tiny/{name}"


@pytest.mark.parametrize("name", ["tokenizer.json", SHARD])
def test_damaged_file_in_the_local_cache_is_named(served: Hub, tmp_path: Path, name: str) -> None:
    cached = Path(hf_hub_download("org/tiny", name)).resolve()
    data = cached.read_bytes()
    cached.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    ended = pack(tmp_path / "out")
    error = ended.json["error"]
    assert (ended.code, error["code"], error["where"]) == (3, "source.hub-digest", f"hf://org/tiny/{name}")
    assert str(cached) in error["hint"]
    cached.unlink()
    assert pack(tmp_path / "out").code == 0


def test_resumed_pack_is_verified_too(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stores.hub.store.Retries", lambda: Retries(num_attempts=2, first_wait_s=0.001))
    assert pack(tmp_path / "whole").code == 0
    num_requests = sum(request.is_cdn and request.method == "GET" for request in served.take_requests())
    served.fail("/cdn/", after=num_requests - 1, times=99, status=503)
    assert pack(tmp_path / "out").code == 3
    served.faults.clear()
    ended = pack(tmp_path / "out")
    assert (ended.code, len(ended.json["hub_verified"])) == (0, 3)
