"""What a hub, its network and its proxies get wrong: mended where it can be, otherwise refused in one sentence."""

from __future__ import annotations

import email.utils
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub import constants

from manifests.errors import InputError, UnreachableError
from stores.address import parse_hub_address
from stores.base import read_whole
from stores.hub import HubFolder, open_hub
from stores.hub_calls import asked_wait_s
from stores.redirects import check_redirect
from stores.retries import Retries
from tests.servers.hub import MEMBER, STRANGER, Hub

MIB = 1 << 20
QUICK = Retries(num_attempts=4, first_wait_s=0.01, longest_wait_s=5.0, window_s=0.2, answer_s=5.0)
WEIGHTS = "model.safetensors"
DATA = random.Random(0).randbytes(20 * MIB)
LAST = len(DATA) - 1


def open_repo(text: str = "hf://org/name") -> HubFolder:
    address = parse_hub_address(text)
    assert address is not None
    return open_hub(address, QUICK)


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
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    hub.fail(path, method="GET" if path == "/cdn/" else "HEAD", **fault)
    assert read_range(folder, 100, 200) == DATA[100:200]
    assert hub.faults[0].times == 0


def test_listing_is_tried_again(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/api/models", times=2, status=503)
    assert open_repo().revision == folder.revision


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


def test_body_cut_again_and_again_is_given_up(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/cdn/", times=99, cut=10)
    with pytest.raises(InputError, match=r"localhost:\d+ cannot be read: .*\(attempt 4, the last\)"):
        read_range(folder, 0, MIB)
    assert sum(request.is_cdn for request in hub.take_requests()) == QUICK.num_attempts


def test_server_that_stays_busy_is_given_up(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/cdn/", times=99, status=503)
    cdn = hub.endpoint.replace("http://127.0.0.1", "localhost")
    with pytest.raises(UnreachableError) as refused:
        read_range(folder, 0, MIB)
    assert str(refused.value) == (
        f"hf://org/name/{WEIGHTS}: {cdn} answers 503 (attempt 4, the last)\nhint: try again later"
    )
    assert sum(request.is_cdn for request in hub.take_requests()) == QUICK.num_attempts


def test_wait_of_minutes_is_not_waited_for(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/resolve/", method="HEAD", times=99, status=429, headers={"RateLimit": '"resolvers";r=0;t=172'})
    with pytest.raises(InputError) as refused:
        read_range(folder, 0, MIB)
    assert str(refused.value) == (
        f"hf://org/name/{WEIGHTS}: {hub.endpoint} limits the number of requests (429), and asks for a wait of 172 s\n"
        "hint: try again later; with a token the limits are higher: hf auth login, or set HF_TOKEN"
    )


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"ignore_range": True}, f"expected bytes 10-99/{len(DATA)}, found the whole file"),
        (
            {"headers": {"Content-Range": f"bytes 0-89/{len(DATA)}"}},
            f"expected bytes 10-99/{len(DATA)}, found bytes 0-89/{len(DATA)}",
        ),
        (
            {"headers": {"Content-Range": "bytes 10-99/500"}},
            f"expected bytes 10-99/{len(DATA)}, found bytes 10-99/500",
        ),
        (
            {"headers": {"Content-Range": "bytes 10-99/*"}},
            f"expected bytes 10-99/{len(DATA)}, found bytes 10-99/*",
        ),
        ({"headers": {"Content-Length": "89"}}, "expected 90 bytes, found 89"),
        ({"headers": {"Content-Encoding": "gzip"}}, "expected plain bytes, found the encoding 'gzip'"),
    ],
    ids=["200", "other range", "other size", "no size", "short", "encoded"],
)
def test_answer_that_is_not_what_was_asked_for_is_refused(
    hub: Hub, folder: HubFolder, fault: dict[str, Any], problem: str
) -> None:
    hub.fail("/cdn/", **fault)
    with pytest.raises(InputError) as refused:
        read_range(folder, 10, 100)
    cdn = hub.endpoint.replace("http://127.0.0.1", "localhost")
    assert str(refused.value) == (
        f"hf://org/name/{WEIGHTS}: {problem}\nhint: a proxy before {cdn} may be changing answers; go around it, or "
        f"fetch the file whole: hf download org/name {WEIGHTS} --revision {folder.revision}"
    )
    assert sum(request.is_cdn for request in hub.take_requests()) == 1
    assert read_range(folder, 10, 100) == DATA[10:100]


def test_answers_of_one_file_must_have_one_etag(hub: Hub, folder: HubFolder) -> None:
    read_range(folder, 0, 10)
    hub.fail("/cdn/", headers={"ETag": '"other"'})
    with pytest.raises(InputError, match=r'expected the ETag "[0-9a-f]{64}" of earlier answers, found "other"\n'):
        read_range(folder, 0, 10)


@pytest.mark.parametrize(
    ("header", "said", "what"),
    [
        ("X-Linked-Size", "5", f"size {len(DATA)}"),
        ("X-Linked-Etag", f'"{"0" * 64}"', "SHA-256 [0-9a-f]{64}"),
        ("X-Repo-Commit", "0" * 40, "commit [0-9a-f]{40}"),
    ],
)
def test_hub_that_contradicts_its_own_listing_is_refused(
    hub: Hub, folder: HubFolder, header: str, said: str, what: str
) -> None:
    hub.fail("/resolve/", method="HEAD", headers={header: said})
    found = said.strip('"')
    with pytest.raises(InputError, match=rf"expected the {what} \(listing of {folder.revision}\), found {found}\n"):
        read_range(folder, 0, 10)


def test_expired_address_is_asked_for_anew_once(hub: Hub, folder: HubFolder) -> None:
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
    assert statuses.count(("HEAD", 302)) == 1
    assert ("GET", 403) in statuses


def test_address_that_is_refused_again_and_again_is_given_up(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/cdn/", times=99, status=403)
    cdn = hub.endpoint.replace("http://127.0.0.1", "localhost")
    with pytest.raises(InputError) as refused:
        read_range(folder, 0, 10)
    assert str(refused.value) == (
        f"hf://org/name/{WEIGHTS}: {cdn} refuses the address that the hub signed (403) (attempt 4, the last)"
    )


def test_reading_past_the_end_is_refused(hub: Hub, folder: HubFolder) -> None:
    with pytest.raises(InputError) as refused:
        read_range(folder, LAST, LAST + 2)
    assert str(refused.value) == f"hf://org/name/{WEIGHTS}: ends at byte {LAST + 1}, and was read to {LAST + 2}"
    hub.fail("/cdn/", status=416)
    with pytest.raises(InputError, match=f"has fewer bytes of it than the {len(DATA)} that are listed"):
        read_range(folder, LAST, LAST + 1)


LOG_IN = "hf auth login, or set HF_TOKEN"


@pytest.mark.parametrize(
    ("text", "token", "message"),
    [
        (
            "hf://org/nothing",
            None,
            "hf://org/nothing: no repository on the hub, or it is private: no token was sent\n"
            f"hint: check the name; {LOG_IN}",
        ),
        (
            "org/nothing",
            None,
            "hf://org/nothing: neither a folder here nor a repository on the hub, or it is private: no token was sent\n"
            f"hint: check the name; {LOG_IN}",
        ),
        (
            "hf://org/private",
            STRANGER,
            "hf://org/private: no repository on the hub, or this token may not read it\nhint: check the name",
        ),
        (
            "hf://org/name",
            "hf_unknown",
            f"hf://org/name: the hub does not know this token (401)\nhint: {LOG_IN} to one that is valid",
        ),
        (
            "hf://org/name@v9",
            None,
            "hf://org/name@v9: has no revision 'v9'\nhint: name a branch, a tag or a whole commit hash",
        ),
        (
            "hf://org/na--me",
            None,
            "hf://org/na--me: the hub has no repository of such a name",
        ),
    ],
)  # fmt: skip
def test_repository_that_cannot_be_opened_is_refused_in_a_sentence(
    hub: Hub, folder: HubFolder, monkeypatch: pytest.MonkeyPatch, text: str, token: str | None, message: str
) -> None:
    hub.push("org/private", {"config.json": b"{}"}, private=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(InputError) as refused:
        open_repo(text)
    assert str(refused.value).startswith(message)
    assert "--" in text or str(refused.value) == message  # the rest of that one is huggingface_hub's hint


@pytest.mark.parametrize("token", [None, STRANGER, MEMBER])
def test_gated_repository_says_how_to_get_access(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    hub.push("org/gated", {"config.json": b"{}"}, gated=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    file = open_repo("hf://org/gated").file("config.json")
    if token == MEMBER:
        assert read_whole(file) == b"{}"
        return
    why, then = ("this token has not been granted it", "") if token else ("no token was sent", f", then {LOG_IN}")
    with pytest.raises(InputError) as refused:
        read_whole(file)
    assert str(refused.value) == (
        f"hf://org/gated: access is gated, and {why}\nhint: ask for access at {hub.endpoint}/org/gated{then}"
    )


def test_file_that_is_listed_and_not_there_is_named(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/resolve/", method="HEAD", status=404, headers={"X-Error-Code": "EntryNotFound"})
    with pytest.raises(InputError) as refused:
        read_range(folder, 0, 5)
    assert str(refused.value) == (
        f"hf://org/name: a file that it lists is not there\nhint: look at {hub.endpoint}/org/name"
    )


def test_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(InputError) as refused:
        open_repo()
    assert str(refused.value) == (
        "hf://org/name: http://127.0.0.1:1 cannot be read: [Errno 111] Connection refused (attempt 3, the last)\n"
        "hint: check the network, HTTPS_PROXY and HF_ENDPOINT"
    )


def test_hub_that_goes_away_while_reading_is_named(
    hub: Hub, folder: HubFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(InputError, match=r"http://127.0.0.1:1 cannot be read: \[Errno 111\] Connection refused"):
        read_range(folder, 0, 10)


@pytest.mark.parametrize("body", [b"<html>log in</html>", b"[]", b'{"id": "org/name"}', b'{"id": 5, "siblings": [5]}'])
def test_answer_of_something_that_is_no_hub_is_refused(hub: Hub, body: bytes) -> None:
    hub.fail("/api/models", body=body)
    with pytest.raises(InputError, match=f"{hub.endpoint}"):
        open_repo()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../config.json", "expected a path below its folder, without empty, . or .. parts, found '../config.json'"),
        ("/etc/passwd", "expected a relative path with / as separator and no control characters, found"),
    ],
)
def test_listing_with_a_path_that_climbs_is_refused(hub: Hub, name: str, problem: str) -> None:
    hub.push("org/name", {name: b"{}"})
    with pytest.raises(InputError) as refused:
        open_repo()
    assert str(refused.value).startswith(f"hf://org/name: {problem}")


def test_listing_without_sizes_is_refused(hub: Hub) -> None:
    commit = hub.push("org/name", {"config.json": b"{}"})
    hub.fail("/api/models", body=b'{"id": "org/name", "sha": "%s", "siblings": [{"rfilename": "a"}]}' % commit.encode())
    with pytest.raises(InputError) as refused:
        open_repo()
    assert str(refused.value) == f"hf://org/name/a: expected its size from {hub.endpoint}, found None"


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


def test_wait_until_a_date_is_the_time_until_then() -> None:
    asked_s = asked_wait_s({"retry-after": email.utils.formatdate(time.time() + 60, usegmt=True)})
    assert asked_s is not None
    assert 58 < asked_s <= 60


@pytest.mark.parametrize("head", [False, True], ids=["body", "head"])
@pytest.mark.parametrize("path", ["/cdn/", "/resolve/", "/api/models"])
def test_server_that_sends_a_byte_now_and_then_is_given_up(
    hub: Hub, folder: HubFolder, monkeypatch: pytest.MonkeyPatch, path: str, head: bool
) -> None:
    method = "HEAD" if path == "/resolve/" else "GET"
    hub.fail(path, method=method, times=99, drip_s=0.02, drips_head=head or method == "HEAD")
    impatient = Retries(num_attempts=2, first_wait_s=0.01, window_s=0.2, answer_s=0.3)
    file = replace(folder.files[WEIGHTS], retries=impatient)
    with pytest.raises(UnreachableError) as refused:
        open_hub(folder.address, impatient) if path == "/api/models" else read_whole(file)
    assert refused.value.code == "store.too-slow"


def test_wait_that_is_no_number_of_seconds_is_not_said_to_be_infinite(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/cdn/", status=429, headers={"Retry-After": "9" * 400})
    with pytest.raises(UnreachableError) as refused:
        read_range(folder, 0, 9)
    assert refused.value.code == "store.busy"
    assert "inf" not in refused.value.problem


def test_endpoint_that_is_no_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "")  # HF_ENDPOINT=""
    with pytest.raises(InputError) as refused:
        open_repo()
    assert (refused.value.code, refused.value.where) == ("options.hf-endpoint", "HF_ENDPOINT")


@pytest.mark.parametrize("path", ["/cdn/", "/resolve/"])
def test_redirect_to_a_metadata_service_is_not_followed(hub: Hub, folder: HubFolder, path: str) -> None:
    place = "http://169.254.169.254/latest/meta-data/"
    method = "HEAD" if path == "/resolve/" else "GET"
    hub.fail(path, method=method, status=302, headers={"Location": place, "X-Repo-Commit": folder.revision})
    with pytest.raises(InputError) as refused:
        read_range(folder, 0, 9)
    assert refused.value.code == "store.redirect-refused"
    assert "169.254.169.254" in refused.value.problem


def test_redirect_to_another_server_is_followed_without_the_token(
    hub: Hub, folder: HubFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    assert read_whole(folder.file("config.json")) == b"{}"
    sent = [request for request in hub.take_requests() if "resolve-cache" in request.path]
    assert {request.token for request in sent} == {MEMBER}
    other = hub.endpoint.replace("127.0.0.1", "localhost")
    hub.fail("resolve-cache", status=302, headers={"Location": f"{other}/cdn/{'0' * 64}?sig=0"})
    with pytest.raises(InputError):
        read_whole(folder.file("config.json"))
    assert {request.token for request in hub.take_requests() if request.is_cdn} == {None}


@pytest.mark.parametrize(
    ("origin", "target", "is_followed"),
    [
        ("https://huggingface.co/a", "https://192.0.2.7/b", True),
        ("https://192.0.2.7/a", "http://127.0.0.1:8080/b", False),
        ("https://192.0.2.7/a", "http://[::1]/b", False),
        ("https://192.0.2.7/a", "http://[::ffff:127.0.0.1]/b", False),
        ("https://192.0.2.7/a", "http://localhost/b", False),
        ("https://192.0.2.7/a", "http://2130706433/b", False),
        ("http://127.0.0.1/a", "http://localhost:81/b", True),
        ("http://127.0.0.1/a", "http://169.254.169.254/b", False),
        ("http://127.0.0.1/a", "http://[fe80::1]/b", False),
        ("http://127.0.0.1/a", "http://metadata.google.internal./b", False),
    ],
)
def test_redirects_into_this_machine_and_to_metadata_are_refused(origin: str, target: str, is_followed: bool) -> None:
    if is_followed:
        check_redirect("here", origin, target)
        return
    with pytest.raises(InputError) as refused:
        check_redirect("here", origin, target)
    assert (refused.value.code, refused.value.where) == ("store.redirect-refused", "here")
