"""Stores that only fsspec knows, as a fallback: the same bytes, the same refusals."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from manifests.errors import InputError
from stores.base import read_whole
from stores.object_output import open_output
from stores.objects import open_objects
from tests.builders import files_in, reshard, run, write_model
from tests.process.buckets import MIB, problem, refusal

pytestmark = pytest.mark.process


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({"/model/config.json": b"{}", "/model/stage-000/a.safetensors": bytes(range(256)) * 4096})
    yield filesystem
    filesystem.rm("/model", recursive=True)


class WithRanges(SimpleHTTPRequestHandler):
    """Answers one range a request, as RFC 9110, 14.2 has it; the standard library's own handler ignores them."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, asked = Path(self.translate_path(self.path)), self.headers.get("Range")
        if asked is None or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *args: object) -> None:
        pass


class _WithoutRanges(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve(folder: Path, handler: type[SimpleHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def read(url: str, name: str, begin: int, end: int) -> bytes:
    data = bytearray(end - begin)
    with contextlib.closing(open_objects(url).file(name).open([(begin, end)])) as reader:
        reader.read_into(memoryview(data), begin)
    return bytes(data)


@pytest.mark.usefixtures("memory")
def test_folder_in_memory_reads_as_one_in_a_bucket() -> None:
    folder = open_objects("memory://model")
    assert folder.names() == ("config.json", "stage-000/a.safetensors")
    assert folder.location == "memory://model"
    assert read_whole(folder.file("config.json")) == b"{}"
    assert read("memory://model", "stage-000/a.safetensors", 255, 258) == b"\xff\x00\x01"


def test_file_that_changed_or_is_gone_is_refused(memory: fsspec.AbstractFileSystem) -> None:
    file = open_objects("memory://model").file("config.json")
    pin = file.fingerprint
    memory.pipe("/model/config.json", b"[]")
    assert refusal(lambda: read_whole(file)) == ("source.changed", "memory://model/config.json")
    assert open_objects("memory://model").file("config.json").fingerprint != pin
    memory.rm("/model/config.json")
    assert refusal(lambda: read_whole(file)) == ("store.no-such-file", "memory://model/config.json")


def test_web_server_with_ranges_is_read(tmp_path: Path) -> None:
    data = bytes(range(256)) * 8192
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").write_bytes(data)
    with serve(tmp_path, WithRanges) as address:
        assert open_objects(f"{address}/model/").names() == ("a.safetensors",)
        assert read(f"{address}/model", "a.safetensors", 1000, MIB) == data[1000:MIB]
        gone = refusal(lambda: open_objects(f"{address}/model").file("b"))
        assert gone == ("store.no-such-file", f"{address}/model/b")


def test_web_server_without_ranges_never_gives_wrong_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(range(256)) * 8192)
    with serve(tmp_path, _WithoutRanges) as address:
        assert read(address, "a.safetensors", 0, 1000) == (bytes(range(256)) * 4)[:1000]
        wrong = ("store.wrong-answer", f"{address}/a.safetensors")
        assert refusal(lambda: read(address, "a.safetensors", 1000, 2000)) == wrong


class _Wrong(WithRanges):
    """Answers each range request with `status`, `headers` and `body`, then with more of it for `num_more` times."""

    status: int
    headers_sent: Mapping[str, str]
    body: bytes
    num_more = 0
    num_sent = 0

    def do_GET(self) -> None:
        self.send_response(self.status)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client has hung up
            self.wfile.write(self.body)
            for number in range(self.num_more):
                self.wfile.write(self.body)
                type(self).num_sent = number + 1


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (206, {"Content-Range": "bytes 0-39/1024", "Content-Length": "40"}),  # as of a cache without Range in its key
        (206, {"Content-Range": "bytes 100-138/1024", "Content-Length": "40"}),
        (206, {"Content-Range": "items 100-139/1024", "Content-Length": "40"}),
        (206, {"Content-Length": "40"}),
        (206, {"Content-Range": "bytes 100-139/1024"}),
        (206, {"Content-Range": "bytes 100-139/1024", "Content-Length": "40", "Content-Encoding": "deflate"}),
        (200, {"Content-Length": "40"}),
        (200, {"Content-Range": "bytes 100-139/1024", "Content-Length": "40"}),
    ],
)
def test_answer_that_is_not_the_range_is_refused(status: int, headers: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 4)
    handler = type("Handler", (_Wrong,), {"status": status, "headers_sent": headers, "body": bytes(40)})
    with serve(tmp_path, handler) as address:
        assert refusal(lambda: read(address, "a", 100, 140)) == ("store.wrong-answer", f"{address}/a")


def test_endless_answer_does_not_fill_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1024))
    headers = {"Content-Range": "bytes 100-139/1024"}  # and no length: until the connection ends
    facts = {"status": 206, "headers_sent": headers, "body": bytes(MIB), "num_more": 64}
    handler: Any = type("Handler", (_Wrong,), facts)
    with serve(tmp_path, handler) as address:
        assert refusal(lambda: read(address, "a", 100, 140)) == ("store.wrong-answer", f"{address}/a")
    assert handler.num_sent < 32  # what fits into the system's buffers


class _Signing(WithRanges):
    """Redirects to a signed URL of itself, which it refuses: to everybody, or to those who ask for a range."""

    refuses: tuple[str, ...]

    def do_HEAD(self) -> None:
        self._answer("HEAD", super().do_HEAD)

    def do_GET(self) -> None:
        self._answer("GET", super().do_GET)

    def _answer(self, method: str, answer: Callable[[], None]) -> None:
        if "?" in self.path and method in self.refuses:
            self.send_error(403)
        elif "?" in self.path:
            answer()
        else:
            self.send_response(302)
            self.send_header("Location", f"{self.path}?X-Amz-Credential=KEY&x='y'&X-Amz-Signature=SECRET")
            self.send_header("Content-Length", "0")
            self.end_headers()


@pytest.mark.parametrize("refuses", [("GET",), ("HEAD", "GET")])
def test_signature_of_a_redirect_is_not_in_the_message(refuses: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1024))
    with serve(tmp_path, type("Handler", (_Signing,), {"refuses": refuses})) as address:
        with pytest.raises(InputError) as refused:
            read(address, "a", 100, 140)
        assert (refused.value.code, refused.value.where) == ("store.refused", f"{address}/a")
        assert "403" in str(refused.value)
        assert "X-Amz" not in str(refused.value)


def test_server_that_does_not_answer_is_named() -> None:
    url = "http://127.0.0.1:1/model"
    assert problem(lambda: open_objects(url).file("config.json")).startswith(
        f"{url}/config.json: cannot be read: Cannot connect to host 127.0.0.1:1"
    )


def test_checkpoint_goes_through_a_folder_that_only_fsspec_knows(tmp_path: Path) -> None:
    write_model(tmp_path / "model", num_shards=2)
    assert reshard("pack", tmp_path / "model", "--layout", "pp=2", "--out", tmp_path / "here").code == 0
    for url in ("memory://written", f"file://{tmp_path}/written"):
        run("pack", tmp_path / "model", "--layout", "pp=2", "--out", url)
        folder = open_objects(url)
        assert {name: read_whole(folder.file(name)) for name in folder.names()} == files_in(tmp_path / "here")
        assert reshard("verify", url, "--against", tmp_path / "model").code == 0
        again = reshard("pack", tmp_path / "model", "--layout", "pp=2", "--out", url, "--json")
        assert again.refusal == (3, "output.exists", url)
        assert reshard("pack", url, "--layout", "pp=1", "--out", url, "--force").code == 0
        assert reshard("verify", url, "--against", tmp_path / "model").code == 0
        run("export", url, "--to", "hf", "--out", f"{url}-back")
        folder = open_objects(f"{url}-back")
        assert {name: read_whole(folder.file(name)) for name in folder.names()} == files_in(tmp_path / "model")
        for name in (url, f"{url}-back"):
            fsspec.filesystem(url.partition(":")[0]).rm(name, recursive=True)


class _Folders(WithRanges):
    """Has an index of folders at every address, until it has answered enough to end a test that fails."""

    names: tuple[str, ...]
    num_asked = 0

    def do_GET(self) -> None:
        type(self).num_asked += 1
        if self.num_asked > 500:
            self.send_error(404)
            return
        index = "".join(f'<a href="{name}/">{name}</a>\n' for name in self.names).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(index)))
        self.end_headers()
        self.wfile.write(index)


@pytest.mark.parametrize("num_folders", [2, 100_001])
def test_folders_without_end_are_refused(num_folders: int, tmp_path: Path) -> None:
    names = tuple(f"{number:x}" for number in range(num_folders))
    handler: Any = type("Handler", (_Folders,), {"names": names})
    with serve(tmp_path, handler) as address:
        assert refusal(open_objects(f"{address}/model").names) == ("store.too-many-files", f"{address}/model")
    assert handler.num_asked < 100


def test_failure_leaves_no_file(tmp_path: Path) -> None:
    def write() -> None:
        with open_output(f"file://{tmp_path}/out") as target:
            target.put("config.json", b"{}")
            target.writer("a", 100, [b"0"]).write(memoryview(b"1"), 0, 1, 1)
            raise InputError("source", "cannot be read", code="store.refused")

    assert refusal(write) == ("store.refused", "source")
    assert list((tmp_path / "out").iterdir()) == []


def test_second_writer_is_refused_and_can_take_over(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/out"
    first = open_output(url)
    assert refusal(lambda: open_output(url)) == ("output.unfinished", url)
    second = open_output(url, force=True)
    assert refusal(lambda: first.commit(b"{}")) == ("output.contended", url)
    second.commit(b"{}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]


def test_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with serve(tmp_path, WithRanges) as address:
        assert refusal(lambda: open_output(address)) == ("store.unsupported", f"{address}/.reshard-unfinished")


def test_scheme_that_nobody_knows_is_refused() -> None:
    assert refusal(lambda: open_objects("gopher://host/model")) == ("store.refused", "gopher://host/model")


def test_missing_fsspec_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)  # as when it is not installed
    assert refusal(lambda: open_objects("memory://model")) == ("store.missing-package", "memory://model")


def test_web_server_that_does_not_answer_is_no_empty_folder() -> None:
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/model"
        assert refusal(lambda: open_objects(url).names()) == ("store.refused", url)
