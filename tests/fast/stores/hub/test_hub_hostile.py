"""What a hub or proxy may send to make a client hang, fill its memory or crash: refused with a code."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import pytest
from huggingface_hub.errors import HfHubHTTPError

from stores.address import HubAddress
from stores.base import read_whole
from stores.hub.store import HubFolder, open_hub
from stores.net.retries import Retries
from tests.refusals import refusal, refused
from tests.servers.hub import Hub

ADDRESS = HubAddress(repo="org/name")
QUICK = Retries(num_attempts=2, first_wait_s=0.01, answer_s=5.0)
WEIGHTS = "model.safetensors"
PLACE = f"hf://org/name/{WEIGHTS}"
DATA = bytes(2000)


def read_two(folder: HubFolder) -> None:
    """Read two bytes of the weights, by a request for a range."""
    with closing(folder.file(WEIGHTS).open([(0, 2)])) as reader:
        reader.read_into(memoryview(bytearray(2)), 0)


@pytest.fixture
def folder(hub: Hub) -> HubFolder:
    hub.push("org/name", {"config.json": b"{}", WEIGHTS: DATA})
    folder = open_hub(ADDRESS, QUICK)
    hub.take_requests()
    return folder


def test_refusal_that_arrives_byte_by_byte_is_not_waited_for(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/resolve/", status=404, headers={"X-Error-Code": "EntryNotFound"}, body=b"{}" * 1000, drip_s=0.1)  # 200 s
    file = replace(folder.files[WEIGHTS], retries=replace(QUICK, answer_s=0.5))
    assert refused(lambda: read_whole(file)) == ("store.no-such-file", "hf://org/name")


def test_long_refusal_is_read_in_part(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/resolve/", status=400, body=b"no " * (1 << 20))
    error = refusal(lambda: read_whole(folder.file(WEIGHTS)))
    assert (error.code, error.where) == ("store.refused", "hf://org/name")
    assert isinstance(error.__cause__, HfHubHTTPError)
    assert len(error.__cause__.response.content) == 64 << 10
    assert len(error.problem) < 1100


@pytest.mark.parametrize(
    "change",
    [
        {"sha": 5},
        {"siblings": [{"rfilename": 5, "size": 2}]},
        {"siblings": [{"rfilename": "a", "size": 2, "blobId": 5}]},
    ],
    ids=["commit", "name", "digest"],
)
def test_listing_with_a_number_in_place_of_text_is_refused(hub: Hub, change: dict[str, object]) -> None:
    hub.fail("/api/models", body=json.dumps({"id": "org/name", "sha": "0" * 40, "siblings": [], **change}).encode())
    assert refused(lambda: open_hub(ADDRESS, QUICK)) == ("store.not-a-hub", "hf://org/name")


def test_deeply_nested_listing_is_refused(hub: Hub) -> None:
    hub.fail("/api/models", body=b'{"id": ' + b"[" * 100_000)
    assert refused(lambda: open_hub(ADDRESS, QUICK)) == ("store.not-a-hub", "hf://org/name")


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/cdn/", {"Content-Range": f"bytes 0-1/{'9' * 5000}"}),
        ("/resolve/", {"X-Linked-Size": "9" * 5000}),
    ],
    ids=lambda value: "" if isinstance(value, str) else "".join(value),
)
def test_number_of_thousands_of_digits_is_refused(
    hub: Hub, folder: HubFolder, path: str, headers: dict[str, str]
) -> None:
    hub.fail(path, times=2, headers=headers)
    error = refusal(lambda: read_two(folder))
    assert (error.code, error.where) == ("store.wrong-answer", PLACE)
    assert len(error.problem) < 300


@pytest.mark.parametrize("place", ["http://a]b/", f"http://{'a' * 70}/"])
@pytest.mark.parametrize("path", ["/resolve/", "/cdn/"])
def test_redirect_to_an_invalid_url_is_refused(hub: Hub, folder: HubFolder, path: str, place: str) -> None:
    hub.fail(path, status=302, headers={"Location": place, "X-Repo-Commit": folder.revision})
    assert refused(lambda: read_two(folder)) == ("store.wrong-answer", PLACE)
