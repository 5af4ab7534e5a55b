"""Once the hub has said where a file is, its bytes are read without httpx, under the same conditions."""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.utils import _http

from stores.address import parse_hub_address
from stores.base import read_range
from stores.hub.calls import unreachable
from stores.hub.file import HubFile
from stores.hub.store import open_hub
from stores.net.connections import Connections, is_direct
from stores.net.retries import Retries
from tests.refusals import refused
from tests.servers.hub import Hub

QUICK = Retries(num_attempts=3, first_wait_s=0.01, window_s=0.2, answer_s=5.0)
DATA = random.Random(0).randbytes(3 << 20)
PLACE = "hf://org/name/model.safetensors"


@pytest.fixture
def file(hub: Hub) -> HubFile:
    """A file whose place is known."""
    hub.push("org/name", {"model.safetensors": DATA})
    address = parse_hub_address("hf://org/name")
    assert address is not None
    file = open_hub(address, QUICK).files["model.safetensors"]
    assert read_range(file, 0, 1) == DATA[:1]
    hub.take_requests()
    return file


@pytest.fixture
def of_client(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The requests that huggingface_hub's client sends."""
    sent = list[object]()
    hooks = get_session().event_hooks
    monkeypatch.setattr(get_session(), "event_hooks", {**hooks, "request": [*hooks["request"], sent.append]})
    return sent


def test_later_requests_are_not_sent_by_the_client(hub: Hub, file: HubFile, of_client: list[object]) -> None:
    for begin in (1, 1 << 20, 5):
        assert read_range(file, begin, len(DATA)) == DATA[begin:]
    assert not of_client
    assert [request.status for request in hub.take_requests()] == [206] * 3
    assert [len(idle) for idle in file.connections._idle.values()] == [1]  # the same one each time


def test_client_that_the_user_has_made_sends_all_requests(hub: Hub, file: HubFile) -> None:
    sent = list[object]()

    def make() -> Any:
        client = _http.default_client_factory()
        client.event_hooks["request"].append(sent.append)
        return client

    set_client_factory(make)
    try:
        assert read_range(file, 5, 99) == DATA[5:99]
    finally:
        set_client_factory(_http.default_client_factory)
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("url", "proxy", "expected"),
    [
        ("https://cdn.example.com/a", None, True),
        ("https://cdn.example.com/a", "HTTPS_PROXY", False),
        ("https://cdn.example.com/a", "ALL_PROXY", False),
        ("https://cdn.example.com/a", "HTTP_PROXY", True),
        ("https://inside.example.org/a", "HTTPS_PROXY", True),
        ("https://name:password@cdn.example.com/a", None, False),
        ("https://cdn.example.com/a b", None, False),
        ("https://cdn.example.com/\u00fc", None, False),
    ],
)
def test_proxies_and_passwords_are_left_to_the_client(
    monkeypatch: pytest.MonkeyPatch, url: str, proxy: str | None, expected: bool
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("no_proxy", "example.org")
    if proxy:
        monkeypatch.setenv(proxy.lower(), "http://proxy.example.com:3128")
    assert is_direct(url) is expected


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 429, "headers": {"Retry-After": "0"}},
        {"status": 503},
        {"delay_s": 1.5},
        {"drop": True},
        {"cut": 1 << 20},
        {"status": 403},
        {"headers": {"Content-Length": None}, "cut": 100},
        {"status": 302, "headers": {"Location": "/nowhere"}},
    ],
    ids=["busy", "unavailable", "late", "dropped", "cut", "refused", "no length", "redirect"],
)
def test_fault_that_passes_costs_no_byte(
    hub: Hub, file: HubFile, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.fail("/cdn/", **fault)
    assert read_range(file, 7, len(DATA)) == DATA[7:]
    assert hub.faults[0].times == 0


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"headers": {"Content-Range": f"bytes 0-89/{len(DATA)}"}}, "wrong-answer"),
        ({"headers": {"Content-Length": "89"}}, "wrong-answer"),
        ({"headers": {"Content-Encoding": "gzip"}}, "wrong-answer"),
        ({"headers": {"ETag": '"other"'}}, "wrong-answer"),
        ({"ignore_range": True}, "wrong-answer"),
        ({"status": 416}, "wrong-answer"),
        ({"status": 503}, "busy"),
        ({"drip_s": 0.02}, "too-slow"),
        ({"drip_s": 0.02, "drips_head": True}, "too-slow"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_other_bytes_than_asked_for_are_refused(hub: Hub, file: HubFile, fault: dict[str, Any], code: str) -> None:
    hub.fail("/cdn/", times=9, **fault)
    impatient = replace(file, retries=replace(QUICK, num_attempts=2, answer_s=0.3))
    assert refused(lambda: read_range(impatient, 10, 100)) == (f"store.{code}", PLACE)


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server with TLS, and its certificate, which no authority signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")]), datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate, pem = tmp_path / "certificate.pem", serialization.Encoding.PEM
    certificate.write_bytes(signed.public_bytes(pem))
    unencrypted = serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, unencrypted)
    (tmp_path / "key.pem").write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, tmp_path / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError), context.wrap_socket(server.accept()[0], server_side=True) as connection:
                while connection.recv(1 << 16):
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"https://localhost:{server.getsockname()[1]}/file", certificate
        thread.join(10)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_certificates_are_verified_by_the_authorities_of_the_system(
    secure: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    url, certificate = secure
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    connections, found = Connections(), bytearray(2)
    try:
        for _ in range(2 if is_trusted else 1):
            with connections.get(url, {}, 5.0, 5.0) as answer:
                assert answer.read_into(memoryview(found)) == 2
    except ssl.SSLCertVerificationError:
        assert not is_trusted
    assert found == (b"ab" if is_trusted else bytes(2))


@pytest.fixture
def forgetful() -> Iterator[str]:
    """A server that closes a connection after each response, without saying so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/file"
        thread.join(10)


def test_connection_that_was_closed_while_idle_is_made_again(forgetful: str) -> None:
    connections = Connections()
    for _ in range(2):
        found = bytearray(4)
        with connections.get(forgetful, {}, 5.0, 5.0) as answer:
            nbytes = answer.read_into(memoryview(found))
            assert answer.read_into(memoryview(found)[nbytes:]) == 0
        assert found[:nbytes] == b"ab"


def test_certificate_of_an_unknown_authority_is_refused_with_the_way_to_trust_it(
    secure: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError) as untrusted, Connections().get(secure[0], {}, 5.0, 5.0):
        pass
    assert "SSL_CERT_FILE" in unreachable("localhost", untrusted.value).hint
