"""The address that is connected to is the one that a redirect was allowed to: a name may mean another by then."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from manifests.errors import StoreError
from stores.base import read_whole
from stores.net.connections import Connections, Redirects
from stores.open import open_store
from tests.refusals import refusal
from tests.servers.hub import Hub

NAME = "name.test"
_resolve = socket.getaddrinfo


@pytest.fixture(autouse=True)
def rebinding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers a public address to whoever checks, and loopback to whoever connects."""

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        is_check = sys._getframe(1).f_globals["__name__"] == "stores.net.connections"
        return _resolve("8.8.8.8" if is_check else "127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


class Handler(BaseHTTPRequestHandler):
    paths: list[str]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        is_first = self.path.startswith("/model/")
        self.send_response(302 if is_first else 200)
        if is_first:
            self.send_header("Location", f"http://other.test:{self.server.server_port}/secret")  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0" if is_first else "2")
        self.end_headers()
        self.wfile.write(b"" if is_first else b"{}")

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[tuple[int, list[str]]]:
    paths: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Recording", (Handler,), {"paths": paths})) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, paths
        server.shutdown()


def test_hub_does_not_connect_to_another_address_than_was_checked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push("org/name", {"config.json": b"{}", "model.safetensors": bytes(4096)})
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint.replace("127.0.0.1", NAME))
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{constants.ENDPOINT}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    folder = open_store("hf://org/name")
    assert read_whole(folder.file("config.json")) == b"{}"
    hub.take_requests()
    assert refusal(lambda: read_whole(folder.file("model.safetensors"))).code == "store.redirect-refused"
    assert not any(request.is_cdn for request in hub.take_requests())


def test_direct_connection_sends_nothing_to_another_address_than_was_checked() -> None:
    with serving() as (port, paths):
        redirects = Redirects("here", "https://first.test/file")
        url = f"https://{NAME}:{port}/secret"
        redirects.follow(url)
        plain = url.replace("https", "http")
        with (
            pytest.raises(StoreError) as error,
            Connections().get(plain, {}, 5.0, 5.0, redirects.check_connection),
        ):
            pass
        assert error.value.code == "store.redirect-refused"
        with Connections().get(plain, {}, 5.0, 5.0) as answer:
            assert answer.status_code == 200
    assert paths == ["/secret"]


def test_server_that_a_redirect_led_to_gets_no_further_inside_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = iter(("10.0.0.1", "8.8.8.8", "10.0.0.2"))
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **options: _resolve(next(addresses), *rest, **options)
    )
    redirects = Redirects("here", "https://first.test/file")
    redirects.follow("https://second.test/file")
    assert refusal(lambda: redirects.follow("https://third.test/file")).code == "store.redirect-refused"
