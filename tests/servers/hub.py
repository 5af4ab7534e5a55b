"""A model hub on loopback: the part of the hub's protocol that huggingface_hub 1.x and 2.x read and write with.

The endpoint is 127.0.0.1. Large files redirect to signed addresses at localhost, which is another host to any
client. Every request is logged, with the bytes of its body that were sent; faults happen on demand.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests.servers.hub_writing import WritingRoutes

MEMBER, STRANGER = "hf_member", "hf_stranger"  # both tokens are valid; one may read what is gated or private
_LARGE_NBYTES = 1024  # files from here on are not in git, but on the other host
_PAGE_ENTRIES = 3
AGENTS = "/api/agent-harnesses"  # asked by newer versions of huggingface_hub, for themselves, once a process


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request that was answered. `nbytes` counts the body that was sent."""

    method: str
    host: str
    path: str
    range: str | None
    token: str | None
    status: int
    nbytes: int

    @property
    def is_cdn(self) -> bool:
        return self.path.startswith("/cdn/")


@dataclass(kw_only=True, slots=True)
class Fault:
    """What goes wrong with the next `times` requests whose path holds a match of `path`, once `after` went well."""

    path: str
    times: int = 1
    after: int = 0
    method: str = "GET"
    status: int | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)  # added to the answer's own; None: left out
    body: bytes | None = None  # of the answer, whatever was asked
    cut: int | None = None  # bytes of the body after which the connection breaks
    drop: bool = False  # the connection breaks before any answer
    act: Callable[[], object] = lambda: None  # as the request comes
    after_work: bool = False  # with `drop`: once the request was carried out
    take: int | None = None  # bytes of the request's body after which the connection breaks
    ignore_range: bool = False
    delay_s: float = 0.0
    late_s: float = 0.0  # between the request being carried out and the answer
    drip_s: float = 0.0  # between any two bytes that are sent, those of the head too where `drips_head`
    drips_head: bool = False


class _File:
    """A file of a commit, under the hashes that the hub knows it by."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        self.sha256 = hashlib.sha256(data).hexdigest() if len(data) >= _LARGE_NBYTES else None

    def entry(self, path: str) -> dict[str, Any]:
        entry = {"rfilename": path, "path": path, "size": len(self.data), "oid": self.git, "blobId": self.git}
        if self.sha256:
            lfs = {"size": len(self.data), "sha256": self.sha256, "oid": self.sha256, "pointerSize": 134}
            return entry | {"lfs": lfs}
        return entry


@dataclass(kw_only=True, slots=True)
class _Repo:
    gated: bool
    private: bool
    commits: dict[str, dict[str, _File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)


class Hub:
    """What the server serves, and what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.endpoint = ""
        self.part_nbytes: int | None = None  # of uploads in parts; None: in one piece
        self.parts: dict[tuple[str, int], bytes] = {}
        self.upload_query = ""  # of the URLs to which large files are sent
        self.gitignore = ""
        self.messages: list[str] = []  # of commits that clients made
        self._repos: dict[str, _Repo] = {}
        self._large: dict[str, bytes] = {}
        self._num_signed = self._oldest_valid = 0

    def push(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        ref: str = "main",
        gated: bool = False,
        private: bool = False,
        parent: str = "",
    ) -> str:
        """Make these files the branch's newest commit; give its hash."""
        stored = {path: _File(data) for path, data in sorted(files.items())}
        listing = "".join(f"{path} {file.git}\n" for path, file in stored.items())
        commit = hashlib.sha1((parent + listing).encode()).hexdigest()
        self._large |= {file.sha256: file.data for file in stored.values() if file.sha256}
        repo = self._repos.setdefault(name, _Repo(gated=gated, private=private))
        repo.commits[commit] = stored
        repo.refs[ref] = commit
        return commit

    def keep(self, sha256: str, data: bytes) -> None:
        """Keep a large file that was uploaded, in a commit or not."""
        self._large[sha256] = data

    def files(self, name: str, ref: str = "main") -> dict[str, bytes]:
        """Return a branch's files."""
        repo = self._repos[name]
        return {path: file.data for path, file in repo.commits[repo.refs[ref]].items()}

    def fail(self, path: str, **fault: Any) -> None:
        with self.lock:
            self.faults.append(Fault(path=path, **fault))

    def damage(self, sha256: str, position: int) -> None:
        """Flip a bit of a large file on the other host, which the hub goes on listing as it was."""
        data = bytearray(self._large[sha256])
        data[position] ^= 1
        self._large[sha256] = bytes(data)

    def expire_links(self) -> None:
        """Make every signed address that was given out so far invalid."""
        with self.lock:
            self._oldest_valid = self._num_signed

    def take_requests(self) -> list[Request]:
        """Give the requests since the last call, without those that huggingface_hub sends for itself."""
        with self.lock:
            taken, self.requests = self.requests, []
        return [request for request in taken if request.path != AGENTS]

    def take_fault(self, method: str, path: str) -> Fault:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                    if fault.after > 0:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault
        return Fault(path="")

    def sign(self) -> int:
        with self.lock:
            self._num_signed += 1
            return self._num_signed - 1

    def is_valid(self, signature: str) -> bool:
        return signature.isdecimal() and int(signature) >= self._oldest_valid

    def repo(self, name: str) -> _Repo | None:
        return self._repos.get(name)

    def large(self, sha256: str) -> bytes | None:
        return self._large.get(sha256)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve a hub without repositories, until the block ends."""
    hub = Hub()
    server = _Server(("127.0.0.1", 0), lambda *args: Handler(hub, *args))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def set_up(patch: pytest.MonkeyPatch, hub: Hub, cache: Path) -> None:
    """Make huggingface_hub as it is in a process that started with HF_ENDPOINT and HF_HOME set, and no token."""
    patch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HOME", str(cache))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its servers are not on loopback
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.delenv("HF_TOKEN", raising=False)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients that hang up are part of the tests
            super().handle_error(request, client_address)


class Handler(WritingRoutes, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def begin(self) -> bool:
        """Read the request; return whether there is anything left to do, after a fault."""
        self.fault = self.hub.take_fault(self.command, self.path)
        time.sleep(self.fault.delay_s)
        self.fault.act()
        self.url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(self.url.query).items()}
        nbytes = int(self.headers.get("Content-Length", "0"))
        self.sent = self.rfile.read(nbytes if self.fault.take is None else self.fault.take)
        if self.fault.take is not None or (self.fault.drop and not self.fault.after_work):
            self.close_connection = True
            return False
        if self.fault.status is not None:
            self.answer(self.fault.status, self.fault.body or b"{}")
            return False
        if self.fault.body is not None:
            self.answer(200, self.fault.body)
            return False
        return True

    def do_GET(self) -> None:
        if not self.begin():
            return
        routes: dict[str, Callable[..., None]] = {
            r"/cdn/([0-9a-f]{64})": self.cdn,
            r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?": self.model_info,
            r"/api/models/([^/]+/[^/]+)/tree/([^/]+)": self.tree,
            r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)": self.resolve_cache,
            r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)": self.resolve,
        }
        for pattern, route in routes.items():
            if match := re.fullmatch(pattern, self.url.path):
                route(*(unquote(part) if part else "main" for part in match.groups()))
                return
        self.refuse(404, "no such route")

    do_HEAD = do_GET

    # What is asked

    def model_info(self, name: str, revision: str) -> None:
        if found := self.find(name, revision):
            repo, commit, files = found
            siblings = [file.entry(path) for path, file in files.items()]
            if "blobs" not in self.query:
                siblings = [{"rfilename": entry["rfilename"]} for entry in siblings]
            gated = "auto" if repo.gated else False
            info = {"id": name, "sha": commit, "private": repo.private, "gated": gated, "siblings": siblings}
            self.answer(200, json.dumps({"_id": "0", "tags": [], "downloads": 0, **info}).encode())

    def tree(self, name: str, revision: str) -> None:
        if found := self.find(name, revision):
            entries = [{"type": "file", **file.entry(path)} for path, file in found[2].items()]
            first = int(self.query.get("cursor", "0"))
            headers = {}
            if first + _PAGE_ENTRIES < len(entries):
                link = f"{self.hub.endpoint}{self.url.path}?recursive=true&cursor={first + _PAGE_ENTRIES}"
                headers["Link"] = f'<{link}>; rel="next"'
            self.answer(200, json.dumps(entries[first : first + _PAGE_ENTRIES]).encode(), headers)

    def resolve(self, name: str, revision: str, path: str) -> None:
        if found := self.find_file(name, revision, path):
            commit, file = found
            if file.sha256 is None:
                place = f"/api/resolve-cache/models/{name}/{commit}/{quote(path)}?etag={file.git}"
                self.answer(307, b"", {"X-Repo-Commit": commit, "Location": place})
                return
            other_host = self.hub.endpoint.replace("127.0.0.1", "localhost")
            place = f"{other_host}/cdn/{file.sha256}?sig={self.hub.sign()}"
            linked = {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.data))}
            self.answer(302, b"", {"X-Repo-Commit": commit, "Location": place, **linked})

    def resolve_cache(self, name: str, commit: str, path: str) -> None:
        if found := self.find_file(name, commit, path):
            self.blob(found[1].data, {"X-Repo-Commit": commit, "ETag": f'"{found[1].git}"'})

    def cdn(self, sha256: str) -> None:
        data = self.hub.large(sha256)
        if data is None or not self.hub.is_valid(self.query.get("sig", "")):
            self.answer(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        else:
            self.blob(data, {"ETag": f'"{sha256[::-1]}"'})  # the other host's own, not the hub's

    # Who may have it

    def find(self, name: str, revision: str) -> tuple[_Repo, str, dict[str, _File]] | None:
        repo, token = self.hub.repo(name), self.token
        if token not in (None, MEMBER, STRANGER):
            self.refuse(401, "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and token != MEMBER):
            self.refuse(404 if token else 401, "Repository not found", "RepoNotFound")
        elif (commit := repo.refs.get(revision, revision)) not in repo.commits:
            self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        else:
            return repo, commit, repo.commits[commit]
        return None

    def find_file(self, name: str, revision: str, path: str) -> tuple[str, _File] | None:
        found = self.find(name, revision)
        if found is None:
            return None
        repo, commit, files = found
        if repo.gated and self.token != MEMBER:
            self.refuse(403 if self.token else 401, f"Access to model {name} is restricted.", "GatedRepo")
        elif path not in files:
            self.refuse(404, "Entry not found", "EntryNotFound")
        else:
            return commit, files[path]
        return None

    # How it is answered

    @property
    def token(self) -> str | None:
        sent = self.headers.get("Authorization")
        return sent.removeprefix("Bearer ") if sent else None

    def blob(self, data: bytes, headers: Mapping[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers = {**headers, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        ignores_range = self.fault.ignore_range or "gzip" in self.headers.get(
            "Accept-Encoding", ""
        )  # as CloudFront does
        if asked is None or ignores_range:
            self.answer(200, data, headers)
            return
        begin, end = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
        if begin >= end:
            self.answer(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
            return
        self.answer(206, data[begin:end], {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"})

    def drip(self, data: bytes) -> None:
        for number in range(len(data)):
            self.wfile.write(data[number : number + 1])
            time.sleep(self.fault.drip_s)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer(status, json.dumps({"error": message}).encode(), headers)

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        sent = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        self.send_response(status)
        for key, value in (sent | dict(self.fault.headers)).items():
            if value is not None:
                self.send_header(key, value)
        body = b"" if self.command == "HEAD" else body[: self.fault.cut]
        # Before any byte is sent: whoever has the answer finds the request in the log.
        entry = Request(
            method=self.command,
            host=self.headers.get("Host", "").partition(":")[0],
            path=self.path,
            range=self.headers.get("Range"),
            token=self.token,
            status=status,
            nbytes=len(body),
        )
        with self.hub.lock:
            self.hub.requests.append(entry)
        time.sleep(self.fault.late_s)
        if self.fault.drop:
            self._headers_buffer = []
            self.close_connection = True
            return
        if self.fault.drips_head:
            head, self._headers_buffer = b"".join(self._headers_buffer), []
            self.drip(head)
        self.end_headers()
        if self.fault.drip_s:
            self.drip(body)
        else:
            self.wfile.write(body)
        if self.fault.cut is not None:
            self.close_connection = True
