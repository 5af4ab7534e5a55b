"""A real S3 server on loopback, in a process of its own: moto's, with a log of its requests and faults on demand.

It checks signatures and permissions as S3 does: `owner` may do everything, `stranger` nothing.
"""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import boto3

ROOT = Path(__file__).parents[2]
REGION = "us-east-1"
_FAULTS_PATH = "/faults"
_STRIKE_PATH = "/strike"
_POLICY = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    access_key: str
    secret_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request as the server answered it: `received_nbytes` of body, and `sent_nbytes` sent back."""

    method: str
    path: str
    query: str
    range: str
    status: int
    sent_nbytes: int
    received_nbytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What goes wrong with the next `times` requests of a method whose address contains `address`."""

    method: str
    address: str
    what: Literal["status", "lost", "redirect", "cut", "short", "ignore if-match", "ignore range"]
    status: int = 503  # of "status"; "lost" does as it is told, and answers with that too
    times: int = 1
    body: str = ""  # of "status"


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """What happens at the `at`-th request from now on: a signal to `pid`, or an answer in place of the store's.

    `is_done` says whether the request is carried out all the same. Answers other than signals go on for `times`.
    """

    pid: int
    act: str  # a signal's name, or a status
    at: int
    is_done: bool = False
    times: int = 1


PAGE_KEYS = 100  # in an answer to a listing; S3 gives 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class MotoServer:
    endpoint: str
    owner: Account
    stranger: Account
    log: Path

    def client(self) -> Any:
        """Give boto3's client, as the owner."""
        return _client("s3", self.endpoint, self.owner)

    def bucket(self, name: str) -> str:
        self.client().create_bucket(Bucket=name)
        return name

    def environment(self, account: Account | None = None) -> dict[str, str]:
        account = account or self.owner
        return {
            "AWS_ACCESS_KEY_ID": account.access_key,
            "AWS_SECRET_ACCESS_KEY": account.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def objects(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        """Give every object below a prefix, by its whole key."""
        client = self.client()
        return {
            key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in self._keys(client, bucket, prefix)
        }

    def _keys(self, client: Any, bucket: str, prefix: str = "") -> list[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def uploads(self, bucket: str, prefix: str = "") -> list[str]:
        """Give the keys of unfinished multipart uploads below a prefix."""
        return [
            item["Key"]
            for item in self.client().list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", ())
        ]

    def requests(self, method: str, path: str) -> list[Request]:
        """Give the requests of a method for paths that contain `path`, oldest first."""
        whole, _, _ = self.log.read_text().rpartition("\n")  # a line that is being written has no end yet
        found = (Request(**json.loads(line)) for line in whole.splitlines())
        return [request for request in found if request.method == method and path in request.path]

    def empty(self) -> None:
        """Remove every object and unfinished upload, and forget all requests and faults."""
        self.fail()
        client = self.client()
        for bucket in (each["Name"] for each in client.list_buckets()["Buckets"]):
            keys = [{"Key": key} for key in self._keys(client, bucket)]
            for at in range(0, len(keys), 1000):
                client.delete_objects(Bucket=bucket, Delete={"Objects": keys[at : at + 1000]})
            for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()):
                client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        self.log.write_text("")

    def settle(self) -> None:
        """Wait for requests under way, whose sender may be dead; strike no more."""
        strike(self.endpoint, None)

    def fail(self, *faults: Fault) -> None:
        """Let requests go wrong; nothing is left of faults that were asked for before."""
        _post(self.endpoint + _FAULTS_PATH, json.dumps([asdict(fault) for fault in faults]))


@contextmanager
def start_moto(folder: Path) -> Iterator[MotoServer]:
    """Run the server until the block ends; its log lies below `folder`."""
    log = folder / "requests.jsonl"
    log.touch()
    with open(folder / "stderr", "w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.s3", log], cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        anybody = Account(access_key="anybody", secret_key="anything")
        server = MotoServer(endpoint=f"http://127.0.0.1:{port}", owner=anybody, stranger=anybody, log=log)
        iam = _client("iam", server.endpoint, anybody)
        owner, stranger = _account(iam, "owner"), _account(iam, "stranger")
        iam.put_user_policy(UserName="owner", PolicyName="all", PolicyDocument=json.dumps(_POLICY))
        _post(f"{server.endpoint}/moto-api/reset-auth", "0")  # from now on, everybody is checked
        yield MotoServer(endpoint=server.endpoint, owner=owner, stranger=stranger, log=log)
    finally:
        process.terminate()
        process.communicate(timeout=10)


@cache
def _client(service: str, endpoint: str, account: Account) -> Any:
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=account.access_key,
        aws_secret_access_key=account.secret_key,
    )


def _account(iam: Any, name: str) -> Account:
    iam.create_user(UserName=name)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    return Account(access_key=key["AccessKeyId"], secret_key=key["SecretAccessKey"])


def strike(endpoint: str, what: Strike | None) -> None:
    """Ask a server to strike, or to end that."""
    _post(endpoint + _STRIKE_PATH, json.dumps(asdict(what) if what else None))


def _post(url: str, body: str) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)):
        pass


class _Watched:
    """moto's application, logged and disturbed. A request is in the log before its answer is sent."""

    def __init__(self, application: Any, log: Path) -> None:
        self._application = application
        self._log = log
        self._lock = threading.Lock()
        self._faults: list[dict[str, Any]] = []
        self._strike: dict[str, Any] | None = None
        self._is_idle, self._num_active = threading.Condition(), 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path, query = environ["REQUEST_METHOD"], unquote(environ["PATH_INFO"]), environ["QUERY_STRING"]
        if path == _FAULTS_PATH:
            self._faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]
        if path == _STRIKE_PATH:
            with self._is_idle:
                assert self._is_idle.wait_for(lambda: not self._num_active, timeout=30)
                self._strike = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]
        with self._is_idle:
            self._num_active += 1
        try:
            return self._answer(environ, start_response, method, path, query)
        finally:
            with self._is_idle:
                self._num_active -= 1
                self._is_idle.notify_all()

    def _answer(
        self, environ: dict[str, Any], start_response: Any, method: str, path: str, query: str
    ) -> Iterable[bytes]:
        answer: list[Any] = []

        def keep(status: str, headers: list[tuple[str, str]], _: object = None) -> None:
            answer[:] = status, headers

        range_asked, what = environ.get("HTTP_RANGE", ""), ""
        received = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(received)
        if len(received) < int(environ.get("CONTENT_LENGTH") or 0):
            raise ConnectionAbortedError("the sender is gone")
        fault = self._struck() or self._take(method, f"{path}?{query}")
        if fault is not None:
            what = fault["what"]
        if what.startswith("ignore"):
            del environ["HTTP_" + what.removeprefix("ignore ").upper().replace("-", "_")]
        if what in ("status", "redirect"):
            status, body = (fault["status"], fault["body"].encode()) if fault and what == "status" else (301, b"")
            keep(f"{status} Fault", [])
        else:
            with _everybody_allowed() if what.startswith("ignore") else nullcontext():
                body = b"".join(self._application(environ, keep))
        if what == "lost" and fault:
            body = b""
            keep(f"{fault['status']} Fault", [])
        status, headers = answer
        whole_nbytes = len(body)
        if what in ("cut", "short"):
            body = body[: whole_nbytes // 2]
        if what == "short":
            whole_nbytes = len(body)
        if method != "HEAD":
            headers = [item for item in headers if item[0].lower() != "content-length"]
            headers.append(("Content-Length", str(whole_nbytes)))
        self._write(Request(
            method=method, path=path, query=query, range=range_asked, status=int(status[:3]), sent_nbytes=len(body),
            received_nbytes=len(received),
        ))  # fmt: skip
        start_response(status, headers)
        return self._send(body, cut=what == "cut")

    def _send(self, body: bytes, *, cut: bool) -> Iterator[bytes]:
        yield body
        if cut:
            raise ConnectionAbortedError("cut on demand")

    def _struck(self) -> dict[str, Any] | None:
        with self._lock:
            found = self._strike
            if found is None or not found["times"]:
                return None
            found["at"] -= 1
            if found["at"] >= 0:
                return None
            found["times"] -= 1
        if found["act"].startswith("SIG"):
            os.kill(found["pid"], getattr(signal, found["act"]))
            is_dead = found["act"] == "SIGKILL" and not found["is_done"]
            return {"what": "status", "status": 500, "body": ""} if is_dead else None
        return {"what": "lost" if found["is_done"] else "status", "status": int(found["act"]), "body": ""}

    def _take(self, method: str, address: str) -> dict[str, Any] | None:
        with self._lock:
            for fault in self._faults:
                if fault["times"] and fault["method"] == method and fault["address"] in address:
                    fault["times"] -= 1
                    return fault
        return None

    def _write(self, request: Request) -> None:
        with self._lock, open(self._log, "a") as log:
            log.write(json.dumps(asdict(request)) + "\n")


@contextmanager
def _everybody_allowed() -> Iterator[None]:
    """Check no signature: it covers the headers that are taken away."""
    from moto import settings

    settings.INITIAL_NO_AUTH_ACTION_COUNT = math.inf
    yield
    settings.INITIAL_NO_AUTH_ACTION_COUNT = 0


def _serve(log: Path) -> None:
    from moto.core import serialize
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = str(PAGE_KEYS)
    dispatcher = DomainDispatcherApplication(create_backend_app)
    # Each request would list moto's folder, and try the patterns of all services.
    dispatcher.get_backend_for_host = cache(dispatcher.get_backend_for_host)
    serialize.parse_to_aware_datetime = cache(serialize.parse_to_aware_datetime)  # of each object in a listing
    application = _Watched(dispatcher, log)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
