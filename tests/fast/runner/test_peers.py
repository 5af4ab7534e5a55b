"""Shards that the nodes of a job give each other."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from manifests.errors import ShardError, UnreachableError
from manifests.schema import WEIGHTS, Shard
from manifests.store import read_manifest
from runner.bundle import peers
from runner.bundle.cache_folder import CacheFolder
from runner.bundle.packed import open_packed
from runner.bundle.peers import PeerFile, PeerServer, Wanted, assign_sources, own_address
from runner.distributed.world import World
from runner.load.local_cache import LocalCache, _Peers
from stores.base import read_range
from stores.local import LocalFolder
from tests.builders import flip, reshard
from tests.fast.runner.tiny import save_model

HEAD = "HTTP/1.0 206 Partial Content\r\nX-Long: "
BODY = "HTTP/1.0 206 Partial Content\r\nContent-Length: 1000000\r\n\r\n"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    save_model(folder / "tied", tie_word_embeddings=True)
    assert reshard("pack", folder / "tied", "--layout", "pp=2", "--out", folder / "pp2").code == 0
    return folder / "pp2"


@pytest.fixture
def shard(packed: Path) -> Shard:
    return read_manifest(packed).stages[0].shards[0]


@pytest.fixture
def there(tmp_path: Path) -> CacheFolder:
    return CacheFolder(path=tmp_path / "there", limit_s=5)


@pytest.fixture
def here(tmp_path: Path) -> CacheFolder:
    return CacheFolder(path=tmp_path / "here", limit_s=5)


@pytest.fixture
def server(there: CacheFolder, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerServer]:
    monkeypatch.setattr(peers, "_HELD_S", 0.2)
    with PeerServer(there, [shard], "token", "127.0.0.1") as server:
        yield server


def file_of(server: PeerServer, shard: Shard, token: str = "token") -> PeerFile:
    return PeerFile(host="127.0.0.1", port=server.port, token=token, shard=shard, stop=threading.Event())


def fill(folder: CacheFolder, packed: Path, shard: Shard) -> None:
    folder.ensure(LocalFolder(packed).file(shard.path), shard, threading.Event())


@contextmanager
def trickling(text: str, then: Callable[[], None] = lambda: None) -> Iterator[int]:
    """A server that responds with `text` and then 100 bytes/s, for 10 s at most; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(text.encode())
            until_s = time.monotonic() + 10
            with suppress(OSError):
                while time.monotonic() < until_s:
                    self.wfile.write(b"x")
                    then()
                    time.sleep(0.01)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_shard_is_waited_for_and_arrives_whole(
    server: PeerServer, here: CacheFolder, there: CacheFolder, packed: Path, shard: Shard
) -> None:
    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(here.ensure, file_of(server, shard), shard, threading.Event())
        fill(there, packed, shard)
        assert copied.result(timeout=20)
    assert (here.path / shard.path).read_bytes() == (packed / shard.path).read_bytes()


def test_shard_that_does_not_come_is_not_waited_for(server: PeerServer, here: CacheFolder, shard: Shard) -> None:
    server.finish()
    with pytest.raises(UnreachableError) as refused:
        here.ensure(file_of(server, shard), shard, threading.Event())
    assert refused.value.code == "store.unreachable"
    assert not here.has(shard)


def test_wait_ends_when_another_rank_fails(server: PeerServer, here: CacheFolder, shard: Shard) -> None:
    file = file_of(server, shard)
    file.stop.set()
    with pytest.raises(CancelledError):
        here.ensure(file, shard, file.stop)


def test_read_from_a_trickling_node_ends_when_another_rank_fails(here: CacheFolder, shard: Shard) -> None:
    stop = threading.Event()
    with trickling(BODY, then=stop.set) as port, pytest.raises(CancelledError):
        here.ensure(PeerFile(host="127.0.0.1", port=port, token="token", shard=shard, stop=stop), shard, stop)


@pytest.mark.parametrize("text", [BODY, HEAD], ids=["body", "head"])
def test_node_that_trickles_is_too_slow(
    here: CacheFolder, shard: Shard, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(peers, "_WINDOW_S", 0.3)
    monkeypatch.setattr(peers, "_ANSWER_S", 0.3 if text == HEAD else 30.0)
    stop = threading.Event()
    with trickling(text) as port, pytest.raises(UnreachableError) as refused:
        here.ensure(PeerFile(host="127.0.0.1", port=port, token="token", shard=shard, stop=stop), shard, stop)
    assert refused.value.code == "store.too-slow"
    assert not here.has(shard)


def test_damaged_shard_is_refused_on_arrival(
    server: PeerServer, here: CacheFolder, there: CacheFolder, packed: Path, shard: Shard
) -> None:
    fill(there, packed, shard)
    flip(there.path / shard.path, -5)
    with pytest.raises(ShardError) as refused:
        here.ensure(file_of(server, shard), shard, threading.Event())
    assert refused.value.code == "shard.digest-mismatch"
    assert list(here.path.iterdir()) == []


@pytest.mark.parametrize(
    ("token", "path", "status"),
    [
        ("other", None, 403),
        ("", None, 403),
        ("token", "/config.json", 403),
        ("token", "/../../etc/passwd", 403),
        ("token", None, 206),
    ],
)
def test_only_the_job_reads_and_only_shards(
    server: PeerServer, there: CacheFolder, packed: Path, shard: Shard, token: str, path: str | None, status: int
) -> None:
    fill(there, packed, shard)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("GET", path or f"/{shard.path}", headers={"X-Job-Token": token, "Range": "bytes=0-7"})
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (
        status,
        (packed / shard.path).read_bytes()[:8] if status == 206 else b"",
    )
    connection.close()


def test_node_that_is_gone_is_unreachable(here: CacheFolder, there: CacheFolder, shard: Shard) -> None:
    with PeerServer(there, [shard], "token", "127.0.0.1") as server:
        file = file_of(server, shard)
    with pytest.raises(UnreachableError):
        here.ensure(file, shard, threading.Event())


def test_each_shard_is_read_by_one_node_and_the_bytes_are_shared_out() -> None:
    both = [Wanted(path=name, nbytes=nbytes, is_cached=False) for name, nbytes in (("a", 50), ("b", 30), ("c", 20))]
    own = Wanted(path="d", nbytes=40, is_cached=False)
    assert assign_sources({0: both, 1: [*both, own]}) == {"a": 0, "b": 1, "c": 0}


def test_shard_that_a_node_has_comes_from_there() -> None:
    shard = Wanted(path="a", nbytes=50, is_cached=False)
    assert assign_sources({0: [shard], 1: [replace(shard, is_cached=True)], 2: [shard]}) == {"a": 1}
    assert assign_sources({0: [shard], 1: []}) == {}


def test_first_node_is_told_by_name_where_that_is_the_loopback_interface() -> None:
    assert own_address("localhost") == ("0.0.0.0", "localhost")
    assert own_address("no-such-host.invalid") == ("0.0.0.0", "no-such-host.invalid")


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "trickling"])
def test_what_a_node_fails_to_give_is_read_from_the_store(
    packed: Path, there: CacheFolder, here: CacheFolder, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setattr(peers, "_WINDOW_S", 0.3)
    opened = open_packed(packed)
    modules = {module for stage in opened.manifest.stages for module in stage.modules}
    cache = LocalCache(opened.bundles, here, modules, (WEIGHTS,), World(rank=0, local_rank=0, size=2))
    shards = list(opened.manifest.shards)
    with PeerServer(there, shards, "token", "127.0.0.1") as server:
        gone = server.port
    with trickling(BODY) as slow:
        places = {shards[0].path: ("127.0.0.1", gone if is_lost else slow)}
        report = cache._ensure_own(_Peers(places=places, token="token"), threading.Event())
    assert (report.nbytes, report.peer_nbytes) == (sum(shard.nbytes for shard in shards), 0)
    assert all((here.path / shard.path).read_bytes() == (packed / shard.path).read_bytes() for shard in shards)


def test_node_may_have_an_ipv6_address(there: CacheFolder, packed: Path, shard: Shard) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    fill(there, packed, shard)
    with PeerServer(there, [shard], "token", "::1") as server:
        assert read_range(replace(file_of(server, shard), host="::1"), 0, 8) == (packed / shard.path).read_bytes()[:8]


def test_shard_that_cannot_be_read_leaves_no_traceback(
    server: PeerServer, shard: Shard, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CacheFolder, "has", lambda folder, shard: True)
    with pytest.raises(UnreachableError):
        read_range(file_of(server, shard), 0, 8)
    assert capfd.readouterr().err == ""
