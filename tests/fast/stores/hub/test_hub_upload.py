"""Uploads to a hub that stalls or fails: its requests time out and are retried, and no signature is logged."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, get_session

from stores.address import HubAddress
from stores.hub.upload import open_upload
from stores.net.retries import Retries
from tests.refusals import refused
from tests.servers.hub import MEMBER, Hub

# huggingface_hub 1.33 passes files to httpx in the old way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

NAME = "org/tiny"
FILES: dict[str, Path | bytes] = {"config.json": b"{}", "model.safetensors": bytes(2000)}
QUICK = Retries(num_attempts=10, first_wait_s=0.01, idle_s=0.5)
FOREVER_S = 30.0  # compared with the time limits


@pytest.fixture(autouse=True)
def _new_client() -> Iterator[None]:
    """Have no timeouts of an earlier upload, and leave none."""
    close_session()
    yield
    close_session()


@pytest.fixture
def hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_TOKEN", MEMBER)
    return hub


def push() -> str:
    upload = open_upload(HubAddress(repo=NAME), is_public=False, retries=QUICK)
    return upload.commit(FILES, removed=(), message="by a test", before_commit=lambda: None)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/repos/create"), ("POST", "/preupload/"), ("POST", "/batch"), ("PUT", "^/lfs/"), ("POST", "/commit/")],
)
def test_request_that_is_never_answered_is_retried(hub: Hub, method: str, path: str) -> None:
    hub.fail(path, method=method, delay_s=FOREVER_S, drop=True)
    start = time.monotonic()
    push()
    assert time.monotonic() - start < FOREVER_S / 2
    assert hub.faults[0].times == 0
    assert hub.files(NAME).items() >= FILES.items()


def test_commit_whose_answer_never_arrives_is_found(hub: Hub) -> None:
    hub.fail("/commit/", method="POST", late_s=FOREVER_S)
    start = time.monotonic()
    revision = push()
    assert time.monotonic() - start < FOREVER_S / 2
    assert hub.messages == ["by a test"]
    assert hub.repo(NAME).refs["main"] == revision  # type: ignore[union-attr]


def test_invalid_url_to_upload_to_is_refused(hub: Hub) -> None:
    wanted = {
        "oid": hashlib.sha256(bytes(2000)).hexdigest(),
        "size": 2000,
        "actions": {"upload": {"href": "http://localhost:b/"}},
    }
    hub.fail("/batch", method="POST", body=json.dumps({"objects": [wanted]}).encode())
    assert refused(push) == ("store.not-a-hub", "hf://org/tiny")


def test_timeouts_that_the_user_chose_are_kept(hub: Hub) -> None:
    get_session().timeout.read = 70.0
    push()
    assert get_session().timeout.as_dict() == {"connect": 0.5, "read": 70.0, "write": 0.5, "pool": None}
