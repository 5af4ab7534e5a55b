"""A bucket that sends single bytes now and then: neither a timeout between bytes nor a missing chunk ends that."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stores.net.retries import Retries
from stores.objects.store import ObjectFile, open_objects
from tests.process.stores.objects.buckets import BUCKET, MIB, become, refusal

DATA = random.Random(0).randbytes(MIB)
URL = f"s3://{BUCKET}/slow/file"


class _Slow(BaseHTTPRequestHandler):
    """Sends so many bytes of a range at once, then the others one by one."""

    protocol_version = "HTTP/1.1"
    num_at_once: int
    stop: threading.Event
    asked: list[str]

    def do_HEAD(self) -> None:
        self._begin(200, len(DATA))

    def do_GET(self) -> None:
        self.asked.append(self.headers["Range"])
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self._begin(206, last + 1 - first, {"Content-Range": f"bytes {first}-{last}/{len(DATA)}"})
        left = memoryview(DATA)[first : last + 1]
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client has hung up
            self.wfile.write(left[: self.num_at_once])
            for position in range(self.num_at_once, len(left)):
                if self.stop.wait(0.01):
                    return
                self.wfile.write(left[position : position + 1])

    def _begin(self, status: int, nbytes: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        last_modified = "Wed, 21 Oct 2015 07:28:00 GMT"
        facts = {"Content-Length": str(nbytes), "ETag": '"0"', "Last-Modified": last_modified, **(headers or {})}
        for name, value in facts.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def served(monkeypatch: pytest.MonkeyPatch, num_at_once: int) -> Iterator[list[str]]:
    """Serve the object; yield the ranges that are asked for."""
    stop, asked = threading.Event(), list[str]()
    handler = type("Handler", (_Slow,), {"num_at_once": num_at_once, "stop": stop, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_ALLOW_HTTP": "true"}
        account = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        become(monkeypatch, endpoint | account)
        try:
            yield asked
        finally:
            stop.set()
            server.shutdown()
            thread.join()


def opened(num_attempts: int) -> ObjectFile:
    retries = Retries(num_attempts=num_attempts, first_wait_s=0.01, request_s=0.3)
    return open_objects(URL.rpartition("/")[0], retries).file("file")


def read(file: ObjectFile) -> bytes:
    data = bytearray(len(DATA))
    with contextlib.closing(file.open([(0, len(data))])) as reader:
        reader.read_into(memoryview(data), 0)
    return bytes(data)


def test_response_of_single_bytes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch, 0):
        assert refusal(lambda: read(opened(1))) == ("store.unreachable", URL)


def test_slow_response_is_resumed_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch, 400_000) as asked:
        assert read(opened(50)) == DATA
    assert len(set(asked)) > 2


def test_fast_store_is_read_at_once_and_streamed_again_once_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch, len(DATA)) as asked:
        file, stop = opened(1), threading.Event()
        fetch = file.fetching()
        assert fetch.lend(0, 1000, stop) is None  # its speed is not known
        assert not asked
        fetch(memoryview(into := bytearray(len(DATA))), 0, stop)
        file.streams.is_fast = True  # whatever this machine is doing
        lent = fetch.lend(5, 1000, stop)
        assert lent is not None
        assert bytes(lent) == DATA[5:1005] == into[5:1005]
    with served(monkeypatch, 0):
        file = opened(1)
        file.streams.is_fast = True
        assert file.fetching().lend(0, len(DATA), threading.Event()) is None
        assert not file.streams.is_fast
