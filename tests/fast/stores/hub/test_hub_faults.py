"""What a hub, its network and its proxies get wrong: mended where it can be, otherwise refused in one sentence."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub import constants

from manifests.errors import UnreachableError, UserError
from stores.address import parse_hub_address
from stores.base import read_whole
from stores.hub.calls import asked_wait_s
from stores.hub.store import HubFolder, open_hub
from stores.net.connections import Redirects
from stores.net.retries import Retries
from tests.refusals import refusal, refused
from tests.servers.hub import MEMBER, STRANGER, Hub

MIB = 1 << 20
QUICK = Retries(num_attempts=4, first_wait_s=0.01, longest_wait_s=5.0, window_s=0.2, answer_s=5.0)
WEIGHTS = "model.safetensors"
PLACE = f"hf://org/name/{WEIGHTS}"
DATA = random.Random(0).randbytes(20 * MIB)
LAST = len(DATA) - 1


def open_repo(text: str = "hf://org/name") -> HubFolder:
    address = parse_hub_address(text)
    assert address is not None
    return open_hub(address, QUICK)


def without_ports(error: UserError) -> str:
    """Return an error's text with the random ports of servers left out."""
    return re.sub(r"(127\.0\.0\.1|localhost):\d+", r"\1:PORT", str(error))


def read_range(folder: HubFolder, begin: int, end: int) -> bytes:
    data = bytearray(end - begin)
    reader = folder.file(WEIGHTS).open([(begin, end)])
    try:
        reader.read_into(memoryview(data), begin)
    finally:
        reader.close()
    return bytes(data)


@pytest.fixture
def folder(hub: Hub) -> HubFolder:
    hub.push("org/name", {"config.json": b"{}", WEIGHTS: DATA})
    folder = open_repo()
    hub.take_requests()
    return folder


@pytest.mark.parametrize("path", ["/cdn/", "/resolve/"])
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 429},
        {"status": 429, "headers": {"Retry-After": "0"}},
        {"status": 408},
        {"status": 500},
        {"status": 503, "headers": {"Retry-After": "0"}},
        {"delay_s": 1.5},
        {"drop": True},
    ],
    ids=lambda fault: "-".join(map(str, fault.values())),
)
def test_passing_fault_is_tried_again(
    hub: Hub, folder: HubFolder, monkeypatch: pytest.MonkeyPatch, path: str, fault: dict[str, Any]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.fail(path, **fault)
    assert read_range(folder, 100, 200) == DATA[100:200]
    assert hub.faults[0].times == 0


def test_canceled_fetch_that_waited_for_the_place_asks_nothing(hub: Hub, folder: HubFolder) -> None:
    file, stop = folder.files[WEIGHTS], threading.Event()
    fetch = file.fetching()
    assert fetch is not None
    stop.set()
    with pytest.raises(CancelledError):
        fetch(memoryview(bytearray(9)), 0, stop)
    assert not hub.take_requests()


def test_wait_that_the_server_asks_for_is_kept(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/cdn/", status=429, headers={"Retry-After": "1"})
    start = time.monotonic()
    assert read_range(folder, 0, 9) == DATA[:9]
    assert time.monotonic() - start >= 1


def test_cut_body_goes_on_where_it_broke(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/cdn/", cut=3 * MIB)
    hub.fail("/cdn/", cut=2 * MIB)
    assert read_range(folder, 10, 10 * MIB) == DATA[10 : 10 * MIB]
    ranges = [request.range for request in hub.take_requests() if request.is_cdn]
    first, second, third = (int(str(text).removeprefix("bytes=").split("-")[0]) for text in ranges)
    assert first == 10 < second <= 10 + 3 * MIB
    assert second < third <= second + 2 * MIB
    assert {str(text).split("-")[1] for text in ranges} == {str(10 * MIB - 1)}


def test_body_of_no_given_length_that_ends_early_goes_on_where_it_broke(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/cdn/", cut=100, headers={"Content-Length": None})
    assert read_range(folder, 10, 1000) == DATA[10:1000]
    assert [request.range for request in hub.take_requests() if request.is_cdn] == ["bytes=10-999", "bytes=110-999"]


def test_body_longer_than_asked_for_is_not_taken(hub: Hub, folder: HubFolder) -> None:
    said = {"Content-Range": f"bytes 10-99/{len(DATA)}", "Content-Length": None}
    hub.fail("/cdn/", status=206, body=bytes(200), cut=200, headers=said)
    assert read_range(folder, 10, 100) == DATA[10:100]
    assert sum(request.is_cdn for request in hub.take_requests()) == 2


def test_server_that_stays_busy_is_given_up(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/cdn/", times=99, status=503)
    assert refused(lambda: read_range(folder, 0, MIB)) == ("store.busy", PLACE)
    assert sum(request.is_cdn for request in hub.take_requests()) == QUICK.num_attempts


def test_wait_of_minutes_is_not_waited_for(hub: Hub, folder: HubFolder, wording: Callable[[str], None]) -> None:
    hub.fail("/resolve/", times=99, status=429, headers={"RateLimit": '"resolvers";r=0;t=172'})
    error = refusal(lambda: read_range(folder, 0, MIB))
    assert (error.code, error.where) == ("store.busy", PLACE)
    wording(without_ports(error))


@pytest.mark.parametrize(
    "fault",
    [
        {"ignore_range": True},
        {"headers": {"Content-Range": f"bytes 0-89/{len(DATA)}"}},
        {"headers": {"Content-Range": "bytes 10-99/500"}},
        {"headers": {"Content-Range": "bytes 10-99/*"}},
        {"headers": {"Content-Length": "89"}},
        {"headers": {"Content-Encoding": "gzip"}},
    ],
    ids=["200", "other range", "other size", "no size", "short", "encoded"],
)
def test_answer_that_is_not_what_was_asked_for_is_refused(
    hub: Hub, folder: HubFolder, fault: dict[str, Any], wording: Callable[[str], None]
) -> None:
    hub.fail("/cdn/", **fault)
    error = refusal(lambda: read_range(folder, 10, 100))
    assert (error.code, error.where) == ("store.wrong-answer", PLACE)
    wording(without_ports(error).replace(folder.revision, "COMMIT"))
    assert sum(request.is_cdn for request in hub.take_requests()) == 1
    assert read_range(folder, 10, 100) == DATA[10:100]


def test_answers_of_one_file_must_have_one_etag(hub: Hub, folder: HubFolder) -> None:
    read_range(folder, 0, 10)
    hub.fail("/cdn/", headers={"ETag": '"other"'})
    assert refused(lambda: read_range(folder, 0, 10)) == ("store.wrong-answer", PLACE)


@pytest.mark.parametrize(
    ("header", "said"),
    [("X-Linked-Size", "5"), ("X-Linked-Etag", f'"{"0" * 64}"'), ("X-Repo-Commit", "0" * 40)],
)
def test_hub_that_contradicts_its_own_listing_is_refused(hub: Hub, folder: HubFolder, header: str, said: str) -> None:
    hub.fail("/resolve/", headers={header: said})
    error = refusal(lambda: read_range(folder, 0, 10))
    assert (error.code, error.where) == ("store.wrong-answer", PLACE)
    assert folder.revision in error.problem
    assert error.problem.endswith(said.strip('"'))


def test_expired_address_is_asked_for_once_more(hub: Hub, folder: HubFolder) -> None:
    read_range(folder, 0, 10)
    hub.expire_links()
    hub.take_requests()
    readers = [threading.Thread(target=read_range, args=(folder, 0, len(DATA))) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert read_whole(folder.file(WEIGHTS)) == DATA
    statuses = [(request.method, request.status) for request in hub.take_requests()]
    assert statuses.count(("GET", 302)) == 1
    assert ("GET", 403) in statuses


def test_reading_past_the_end_is_refused(hub: Hub, folder: HubFolder) -> None:
    assert refused(lambda: read_range(folder, LAST, LAST + 2)) == ("source.changed", PLACE)
    hub.fail("/cdn/", status=416)
    assert refused(lambda: read_range(folder, LAST, LAST + 1)) == ("store.wrong-answer", PLACE)


@pytest.mark.parametrize(
    ("text", "token", "code"),
    [
        ("hf://org/nothing", None, "no-such-repository"),
        ("org/nothing", None, "no-such-repository"),
        ("hf://org/private", STRANGER, "no-such-repository"),
        ("hf://org/name", "hf_unknown", "invalid-token"),
        ("hf://org/name@v9", None, "no-such-revision"),
        ("hf://org/na--me", None, "malformed-address"),
    ],
)
def test_repository_that_cannot_be_opened_is_refused(
    hub: Hub,
    folder: HubFolder,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    token: str | None,
    code: str,
    wording: Callable[[str], None],
) -> None:
    hub.push("org/private", {"config.json": b"{}"}, private=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    error = refusal(lambda: open_repo(text))
    assert (error.code, error.where) == (f"store.{code}", f"hf://{text.removeprefix('hf://')}")
    if code != "malformed-address":  # its hint is that of huggingface_hub
        wording(str(error))


@pytest.mark.parametrize("token", [None, STRANGER, MEMBER])
def test_gated_repository_says_how_to_get_access(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None, wording: Callable[[str], None]
) -> None:
    hub.push("org/gated", {"config.json": b"{}"}, gated=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    file = open_repo("hf://org/gated").file("config.json")
    if token == MEMBER:
        assert read_whole(file) == b"{}"
        return
    error = refusal(lambda: read_whole(file))
    assert (error.code, error.where) == ("store.gated", "hf://org/gated")
    wording(without_ports(error))


def test_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch, wording: Callable[[str], None]) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    error = refusal(open_repo)
    assert (type(error), error.code, error.where) == (UnreachableError, "store.unreachable", "hf://org/name")
    wording(str(error))


def test_hub_that_goes_away_while_reading_is_named(
    hub: Hub, folder: HubFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert refused(lambda: read_range(folder, 0, 10)) == ("store.unreachable", PLACE)


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"[]", b'{"id": "org/name"}', b'{"id": 5, "siblings": [5]}'])
def test_answer_of_something_that_is_not_a_hub_is_refused(hub: Hub, body: bytes) -> None:
    hub.fail("/api/models", body=body)
    assert refused(open_repo) == ("store.not-a-hub", "hf://org/name")


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd"])
def test_listing_with_a_path_that_climbs_is_refused(hub: Hub, name: str) -> None:
    hub.push("org/name", {name: b"{}"})
    assert refused(open_repo) == ("store.invalid-name", "hf://org/name")


def test_listing_without_sizes_is_refused(hub: Hub) -> None:
    commit = hub.push("org/name", {"config.json": b"{}"})
    hub.fail("/api/models", body=b'{"id": "org/name", "sha": "%s", "siblings": [{"rfilename": "a"}]}' % commit.encode())
    assert refused(open_repo) == ("store.not-a-hub", "hf://org/name/a")


@pytest.mark.parametrize(
    ("headers", "asked_s"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:99999999999 GMT"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"ratelimit": '"api";r=0;t=55'}, 55.0),
        ({"ratelimit": '"api";r=12;t=55'}, None),
    ],
)
def test_wait_is_read_from_either_header(headers: dict[str, str], asked_s: float | None) -> None:
    assert asked_wait_s(headers) == asked_s


@pytest.mark.parametrize("head", [False, True], ids=["body", "head"])
@pytest.mark.parametrize("path", ["/cdn/", "/resolve/", "/api/models"])
def test_server_that_sends_a_byte_now_and_then_is_given_up(
    hub: Hub, folder: HubFolder, monkeypatch: pytest.MonkeyPatch, path: str, head: bool
) -> None:
    hub.fail(path, times=99, drip_s=0.02, drips_head=head or path == "/resolve/")
    impatient = Retries(num_attempts=2, first_wait_s=0.01, window_s=0.2, answer_s=0.3)
    file = replace(folder.files[WEIGHTS], retries=impatient)
    error = refusal(lambda: open_hub(folder.address, impatient) if path == "/api/models" else read_whole(file))
    assert error.code == "store.too-slow"


def test_last_bytes_that_come_too_slowly_are_taken(hub: Hub, folder: HubFolder) -> None:
    """Nothing is left to ask for then, and a server refuses a range of nothing."""
    hub.fail("/cdn/", drip_s=0.05)
    file = folder.files[WEIGHTS]
    slow = replace(folder, files={WEIGHTS: replace(file, retries=replace(QUICK, window_s=0.04))})
    assert read_range(slow, 100, 102) == DATA[100:102]


def test_wait_that_is_no_number_of_seconds_is_not_said_to_be_infinite(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/cdn/", status=429, headers={"Retry-After": "9" * 400})
    error = refusal(lambda: read_range(folder, 0, 9))
    assert error.code == "store.busy"
    assert "inf" not in error.problem


@pytest.mark.parametrize("endpoint", ["", "http://a]b", "http://127.0.0.1:b"])
def test_endpoint_that_is_no_address_is_named(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert refused(open_repo) == ("options.hf-endpoint", "HF_ENDPOINT")


def test_redirect_to_another_server_is_followed_without_the_token(
    hub: Hub, folder: HubFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    assert read_whole(folder.file("config.json")) == b"{}"
    sent = [request for request in hub.take_requests() if "resolve-cache" in request.path]
    assert {request.token for request in sent} == {MEMBER}
    other = hub.endpoint.replace("127.0.0.1", "localhost")
    hub.fail("resolve-cache", times=9, status=302, headers={"Location": f"{other}/cdn/{'0' * 64}?sig=0"})
    with pytest.raises(UserError):
        read_whole(folder.file("config.json"))
    assert {request.token for request in hub.take_requests() if request.is_cdn} == {None}


PUBLIC, PRIVATE, LOCAL = "https://1.1.1.1", "https://10.0.0.1", "http://127.0.0.1"
ALL_PUBLIC = ("8.8.8.8", "[2606:4700::1]", "[64:ff9b::808:808]", "[2002:808:808::1]", "[::ffff:8.8.8.8]")
ALL_PRIVATE = ("10.0.0.2", "192.168.1.1", "100.64.0.1", "192.0.2.7", "[fd12::1]", "[fec0::1]", "[64:ff9b::a00:1]")
ALL_LOCAL = (
    "127.0.0.1:8080", "[::1]", "[::ffff:127.0.0.1]", "localhost", "2130706433", "0.0.0.0", "[::]", "[64:ff9b::7f00:1]",
)  # fmt: skip
ALL_METADATA = (
    "169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "metadata.google.internal.", "168.63.129.16",
    "192.0.0.192", "100.100.100.200", "[fd00:ec2::254]", "[fd20:ce::254]", "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b:1::a9fe:a9fe]", "[2002:a9fe:a9fe::1]", "[2001:0:a9fe:a9fe::1]", "[::a9fe:a9fe]",
)  # fmt: skip


@pytest.mark.parametrize(
    ("origin", "target", "is_followed"),
    [
        *((f"{PUBLIC}/a", f"https://{host}/b", True) for host in ALL_PUBLIC),
        *((f"{PUBLIC}/a", f"https://{host}/b", False) for host in (*ALL_PRIVATE, *ALL_LOCAL, *ALL_METADATA)),
        *((f"{PRIVATE}/a", f"https://{host}/b", True) for host in (*ALL_PUBLIC, *ALL_PRIVATE)),
        *((f"{PRIVATE}/a", f"https://{host}/b", False) for host in (*ALL_LOCAL, *ALL_METADATA)),
        *((f"{LOCAL}/a", f"http://{host}/b", True) for host in (*ALL_PUBLIC, *ALL_PRIVATE, *ALL_LOCAL)),
        *((f"{LOCAL}/a", f"http://{host}/b", False) for host in ALL_METADATA),
        (f"{PUBLIC}/a", "http://8.8.8.8/b", False),
        (f"{PUBLIC.replace('https', 'http')}/a", "http://8.8.8.8/b", True),
    ],
)
def test_redirects_into_this_machine_and_to_metadata_are_refused(origin: str, target: str, is_followed: bool) -> None:
    if is_followed:
        Redirects("here", origin).follow(target)
        return
    assert refused(lambda: Redirects("here", origin).follow(target)) == ("store.redirect-refused", "here")
