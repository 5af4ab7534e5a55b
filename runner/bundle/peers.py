"""Nodes of a job give each other cached shards, so that each is read from the store once. No torch.

A node serves its cache folder to those that have the job's token, while bundles are copied. Who asks for a shard that
is not there yet waits. What arrives is verified like bytes of the store; the store is the way out of every failure.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

from manifests.errors import UnreachableError
from manifests.schema import Shard
from runner.bundle.cache_folder import CacheFolder
from stores.base import Range
from stores.connections import Answer, ConnectionFailure, Connections
from stores.pace import Pace
from stores.retries import PassingError

__all__ = ["PeerFile", "PeerServer", "Wanted", "assign_sources", "own_address"]

_POLL_S = 0.1
_HELD_S = 5.0  # a request for a shard that is not there yet
_SILENT_S = 30.0  # of single reads and writes
_ANSWER_S = 30.0  # from a request to the headers of its response, for some of which `_HELD_S` passes
_WINDOW_S = 30.0  # of the minimum speed in `stores.pace`
_TOKEN = "X-Job-Token"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A shard that a rank copies to its node's cache, or has there."""

    path: str
    nbytes: int
    is_cached: bool


def assign_sources(wanted: Mapping[int, Sequence[Wanted]]) -> dict[str, int]:
    """Return the rank from whose node each shard comes that several ranks want, by path.

    `wanted` has the shards of each rank. One that is in a cache is taken from there. Each of the others is read from
    the store by one rank; the bytes are shared out evenly.
    """
    ranks, nbytes, cached = dict[str, list[int]](), dict[str, int](), dict[str, int]()
    for rank, shards in sorted(wanted.items()):
        for shard in shards:
            ranks.setdefault(shard.path, []).append(rank)
            nbytes[shard.path] = shard.nbytes
            if shard.is_cached:
                cached.setdefault(shard.path, rank)
    given = dict.fromkeys(wanted, 0)
    sources = {}
    for path in sorted(ranks, key=lambda path: (-nbytes[path], path)):
        source = cached[path] if path in cached else min(ranks[path], key=lambda rank: (given[rank], rank))
        if path not in cached:
            given[source] += nbytes[path]
        if len(ranks[path]) > 1:
            sources[path] = source
    return sources


def own_address(master: str) -> tuple[str, str]:
    """Return the address to listen at for other nodes, and the one to tell them; `master` is the first node's.

    On that node its name may mean the loopback interface: the others use the name, as they do to meet there.
    """
    try:
        family, kind, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # UDP: nothing is sent
            found: str = probe.getsockname()[0]
    except OSError:
        found = "127.0.0.1"
    if ipaddress.ip_address(found).is_loopback:
        return "0.0.0.0", master
    return found, found


class PeerServer:
    """Serves a node's cached shards, as a context manager. `finish` says that no more will come."""

    def __init__(self, folder: CacheFolder, shards: Iterable[Shard], token: str, address: str) -> None:
        self.folder, self.token = folder, token
        self.shards = {shard.path: shard for shard in shards}
        self.is_finished = threading.Event()
        kind = _ServerV6 if ":" in address else _Server
        self._server = kind((address, 0), lambda *request: _Handler(self, *request))
        self._thread = threading.Thread(target=self._server.serve_forever, name="peers", daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_port

    def finish(self) -> None:
        self.is_finished.set()

    def __enter__(self) -> PeerServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a node that left in the middle, or of a shard that could not be read: who asked does."""


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = _SILENT_S

    def __init__(self, peer: PeerServer, *request: object) -> None:
        self._peer = peer
        super().__init__(*request)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        shard = self._peer.shards.get(unquote(self.path.removeprefix("/")))
        is_allowed = hmac.compare_digest(self.headers.get(_TOKEN, "").encode(), self._peer.token.encode())
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if shard is None or not is_allowed or asked is None:
            self._refuse(HTTPStatus.FORBIDDEN)
        elif not self._is_there(shard):
            self._refuse(HTTPStatus.NOT_FOUND if self._peer.is_finished.is_set() else HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            begin, end = int(asked[1]), min(int(asked[2]) + 1, shard.nbytes)
            with open(self._peer.folder.path / shard.path, "rb") as file:
                self.send_response(HTTPStatus.PARTIAL_CONTENT)
                self.send_header("Content-Length", str(max(0, end - begin)))
                self.end_headers()
                if end > begin:
                    self.connection.sendfile(file, begin, end - begin)

    def _is_there(self, shard: Shard) -> bool:
        until_s = time.monotonic() + _HELD_S
        while not (is_there := self._peer.folder.has(shard)) and time.monotonic() < until_s:
            if self._peer.is_finished.wait(_POLL_S):
                return self._peer.folder.has(shard)
        return is_there

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFile:
    """A shard in another node's cache, or one that will be there."""

    host: str
    port: int
    token: str = field(repr=False)
    shard: Shard
    stop: threading.Event = field(compare=False)  # ends the wait for it and for its bytes
    fingerprint: str = ""

    @property
    def nbytes(self) -> int:
        return self.shard.nbytes

    def __str__(self) -> str:
        return f"{self.shard.path} at {self.host}:{self.port}"

    def open(self, ranges: Sequence[Range]) -> _PeerReader:
        return _PeerReader(self, ranges[-1][1])


class _PeerReader:
    """Reads sequentially, in one request until `end`."""

    def __init__(self, file: PeerFile, end: int) -> None:
        self._file, self._end = file, end
        self._opened = ExitStack()  # the connection
        self._answer: Answer | None = None
        self._at = -1

    def read_into(self, part: memoryview, position: int) -> None:
        file = self._file
        try:
            if self._answer is None or position != self._at:
                self._answer, self._at = self._ask(position), position
            # A new one for each block: the time that the caller takes between two blocks does not count.
            pace = Pace(f"{file.host}:{file.port}", _WINDOW_S)
            while part:
                count = self._answer.read_into(part)
                if file.stop.is_set():
                    raise CancelledError
                if not count:
                    raise HTTPException("the connection was closed")
                pace.take(count)
                part, self._at = part[count:], self._at + count
        except PassingError as error:
            raise UnreachableError(str(file), error.problem, code=error.code) from error
        except ConnectionFailure as error:
            raise UnreachableError(str(file), f"cannot be read: {error}", code="store.unreachable") from error

    def close(self) -> None:
        self._opened.close()

    def _ask(self, position: int) -> Answer:
        """Ask for the bytes from a position on, until they are there."""
        file = self._file
        headers = {_TOKEN: file.token, "Range": f"bytes={position}-{self._end - 1}"}
        host = f"[{file.host}]" if ":" in file.host else file.host
        url = f"http://{host}:{file.port}{quote(f'/{file.shard.path}')}"
        while True:
            self.close()
            answer = self._opened.enter_context(Connections().get(url, headers, _SILENT_S, _ANSWER_S))
            if answer.status_code == HTTPStatus.PARTIAL_CONTENT and answer.left_nbytes is not None:
                return answer
            if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise HTTPException(f"it answers {answer.status_code}")
            if file.stop.is_set():
                raise CancelledError
