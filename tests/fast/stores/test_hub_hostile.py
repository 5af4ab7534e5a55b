"""What a hub or proxy may send to make a client hang, fill its memory or crash: refused with a code."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from huggingface_hub.errors import HfHubHTTPError

from stores.address import HubAddress
from stores.base import read_whole
from stores.hub import HubFolder, open_hub
from stores.retries import Retries
from tests.refusals import refusal, refused
from tests.servers.hub import Hub

ADDRESS = HubAddress(repo="org/name")
QUICK = Retries(num_attempts=2, first_wait_s=0.01, answer_s=5.0)
WEIGHTS = "model.safetensors"
PLACE = f"hf://org/name/{WEIGHTS}"
DATA = bytes(2000)


@pytest.fixture
def folder(hub: Hub) -> HubFolder:
    hub.push("org/name", {"config.json": b"{}", WEIGHTS: DATA})
    folder = open_hub(ADDRESS, QUICK)
    hub.take_requests()
    return folder


def test_refusal_that_arrives_byte_by_byte_is_not_waited_for(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/resolve/", status=404, headers={"X-Error-Code": "EntryNotFound"}, body=b"{}" * 150, drip_s=0.1)
    file = replace(folder.files[WEIGHTS], retries=replace(QUICK, answer_s=0.5))
    start = time.monotonic()
    assert refused(lambda: read_whole(file)) == ("store.no-such-file", "hf://org/name")
    assert time.monotonic() - start < 15


def test_long_refusal_is_read_in_part(hub: Hub, folder: HubFolder) -> None:
    hub.fail("/resolve/", status=400, body=b"no " * (1 << 20))
    error = refusal(lambda: read_whole(folder.file(WEIGHTS)))
    assert (error.code, error.where) == ("store.refused", "hf://org/name")
    assert isinstance(error.__cause__, HfHubHTTPError)
    assert len(error.__cause__.response.content) == 64 << 10
    assert len(error.problem) < 1100
