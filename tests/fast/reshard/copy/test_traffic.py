"""What `pack --dry-run` says will be read and written, held against what lies on disk before and after."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.builders import files_in, llama_config, random_tensors, reshard, write_model
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.transforms.test_dequantize import fp8, write_quantized
from tests.fast.sliced import CUTS, cut_up
from tests.fast.trained import write_trained
from tests.process.stores.objects.buckets import become

BIG = llama_config(hidden_size=512, num_attention_heads=16, intermediate_size=64, vocab_size=64)  # sectors are full
NBYTES = 18208  # of the tensors of llama_config(), in BF16


def told(source: Path, *flags: str | Path) -> dict[str, Any]:
    """Return what a dry run says, having packed and seen that as much was written."""
    pack = ("pack", source, "--layout", "pp=2", "--out", source.parent / "out", *flags)
    plan: dict[str, Any] = reshard(*pack, "--dry-run", "--json").json
    assert reshard(*pack).code == 0
    shards = (source.parent / "out").rglob("*.safetensors")
    assert plan["write_nbytes"] == sum(shard.stat().st_size for shard in shards)
    return plan


@pytest.mark.parametrize(
    ("flags", "nbytes"),
    [((), NBYTES), (("--dtype", "fp32"), NBYTES), (("--dtype", "bf16"), NBYTES), (("--virtual",), 0)],
    ids=["plain", "fp32", "bf16", "virtual"],
)
def test_stored_bytes_are_read_whatever_becomes_of_them(flags: tuple[str, ...], nbytes: int, tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    assert told(tmp_path / "source", *flags)["read_nbytes"] == nbytes


def test_stages_that_are_not_packed_are_not_read(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    plan = told(tmp_path / "source", "--stages", "1")
    assert plan["read_nbytes"] == plan["stages"][1]["nbytes"] < NBYTES
    text = reshard("pack", tmp_path / "source", "--layout", "pp=2", "--virtual", "--out", tmp_path / "v", "--dry-run")
    assert text.out.splitlines()[-1] == "to read 0 B, to write 0 B"


def test_scales_of_quantized_weights_are_read_with_them(tmp_path: Path) -> None:
    config = {**read_config("tiny-deepseek-v3"), "quantization_config": fp8(128, 128)}
    stored = write_quantized(tmp_path / "source", config)
    plan = told(tmp_path / "source", "--dequantize", "fp32")
    assert plan["read_nbytes"] == sum(len(tensor.data) for tensor in stored.values())


def test_slices_that_are_merged_on_their_way_are_read_as_they_lie(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2")
    cut_up(trained, CUTS["rows"])
    stored = sum(stage["nbytes"] for stage in json.loads((trained / "manifest.json").read_text())["stages"])
    asked = ("pack", trained, "--out", tmp_path / "out", "--dry-run", "--json")
    plans = [reshard(*asked, *flags).json for flags in ((), ("--merge-slices",))]
    assert plans[0]["read_nbytes"] == plans[1]["read_nbytes"] == 3 * stored  # weights and two moments


class _Bucket:
    """A bucket on this machine; `on_read` and `on_write` are called before a request is answered."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.on_read: Callable[[str, int, int], object] = lambda name, first, last: None
        self.on_write: Callable[[str], object] = lambda name: None


class _Requests(BaseHTTPRequestHandler):
    """What obstore asks of S3 for objects of less than one part."""

    protocol_version = "HTTP/1.1"
    bucket: _Bucket

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if "list-type=2" in url.query:
            prefix = parse_qs(url.query).get("prefix", [""])[0]
            rows = "".join(
                f"<Contents><Key>{name}</Key><LastModified>{TIME}</LastModified><ETag>{tag_of(data)}</ETag>"
                f"<Size>{len(data)}</Size></Contents>"
                for name, data in self.bucket.objects.items()
                if name.startswith(prefix)
            )
            self.answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode())
            return
        data = self.bucket.objects.get(self.name)
        if data is None:
            self.answer(404, b"")
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", f"bytes=0-{len(data) - 1}"))
        assert asked is not None
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        self.bucket.on_read(self.name, first, last)
        headers = {"ETag": tag_of(data), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if "Range" not in self.headers:
            self.answer(200, data, headers)
            return
        self.answer(206, data[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.bucket.on_write(self.name)
        if self.headers.get("If-None-Match") == "*" and self.name in self.bucket.objects:
            self.answer(412, b"")
            return
        self.bucket.objects[self.name] = data
        self.answer(200, b"", {"ETag": tag_of(data)})

    def do_POST(self) -> None:
        names = re.findall("<Key>(.*?)</Key>", self.rfile.read(int(self.headers["Content-Length"])).decode())
        for name in names:
            self.bucket.objects.pop(name, None)
        rows = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self.answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())

    @property
    def name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


TIME = "2026-01-01T00:00:00.000Z"


def tag_of(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:16]}"'


@contextmanager
def bucket_of(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Bucket]:
    """Serve a folder as s3://bucket/source."""
    bucket = _Bucket({f"source/{name}": data for name, data in files_in(source).items()})
    handler = type("Handler", (_Requests,), {"bucket": bucket})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        become(monkeypatch, {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
        })  # fmt: skip
        try:
            yield bucket
        finally:
            server.shutdown()
            thread.join()


def test_config_index_and_headers_are_requested_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, passed = threading.Barrier(4), set[str]()

    def wait(name: str, first: int, last: int) -> None:
        if name not in passed:
            passed.add(name)
            waiting.wait(10)

    write_model(tmp_path / "source", num_shards=2)
    with bucket_of(tmp_path / "source", monkeypatch) as bucket:
        bucket.on_read = wait
        assert reshard("plan", "s3://bucket/source", "--layout", "pp=2").code == 0
    assert {Path(name).name for name in passed} == {
        "config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }  # fmt: skip


def test_shards_are_read_while_earlier_ones_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    tensors = write_model(tmp_path / "source", config, random_tensors(config))
    left_nbytes, is_all_read = sum(len(tensor.data) for tensor in tensors.values()), threading.Event()
    lock, waited = threading.Lock(), list[bool]()

    def count(name: str, first: int, last: int) -> None:
        nonlocal left_nbytes
        if name.endswith(".safetensors") and first > 0:  # not the header
            with lock:
                left_nbytes -= last + 1 - first
            if left_nbytes <= 0:
                is_all_read.set()

    def write_late(name: str) -> None:
        if name.startswith("out/model-00001-of-00004"):
            waited.append(is_all_read.wait(10))

    with bucket_of(tmp_path / "source", monkeypatch) as bucket:
        bucket.on_read, bucket.on_write = count, write_late
        pack = ("pack", "s3://bucket/source", "--layout", "pp=4", "--out", "s3://bucket/out", "--io-memory", "26MiB")
        assert reshard(*pack).code == 0
        assert waited == [True]
        assert reshard("verify", "s3://bucket/out", "--against", tmp_path / "source").code == 0


def test_parts_read_and_write_what_all_of_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "source", BIG, random_tensors(BIG, dtypes=["F32"]))
    asked = ("pack", tmp_path / "source", "--layout", "pp=3", "--out", tmp_path / "out", "--dry-run", "--json")
    whole = reshard(*asked).json
    parts = [reshard(*asked, "--part", f"{number}/3").json for number in (1, 2, 3)]
    for key in ("read_nbytes", "write_nbytes"):
        assert sum(part[key] for part in parts) == whole[key]
        assert all(0 < part[key] < whole[key] for part in parts)
