"""Uploads to a hub that stalls or fails: its requests time out and are retried, and no signature is logged."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, get_session
from huggingface_hub.utils import _http

from stores.address import HubAddress
from stores.hub.upload import open_upload, uploading
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


@pytest.mark.parametrize("fault", [{"status": 503}, {"drop": True}], ids=str)
@pytest.mark.parametrize(
    ("name", "level"), [("huggingface_hub.utils._http", logging.WARNING), ("httpx", logging.INFO)], ids=["hub", "httpx"]
)
def test_signature_of_an_upload_url_is_not_logged(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: dict[str, Any],
    name: str,
    level: int,
) -> None:
    logger = logging.getLogger(name)  # whose parents other tests may have silenced
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "disabled", False)
    caplog.set_level(level, logger.name)
    hub.upload_query = "?X-Amz-Signature=secret&partNumber=1"
    hub.fail("^/lfs/", method="PUT", **fault)
    push()
    sent = [request.path for request in hub.take_requests() if request.method == "PUT"]
    assert sent
    assert "secret" in sent[-1]
    assert "/lfs/" in caplog.text
    assert "secret" not in caplog.text


def test_clients_made_while_another_upload_goes_on_time_out() -> None:
    factory = _http._GLOBAL_CLIENT_FACTORY
    with ExitStack() as second:
        with uploading(5.0):
            second.enter_context(uploading(5.0))
        close_session()
        assert get_session().timeout.read == 5.0
    assert _http._GLOBAL_CLIENT_FACTORY is factory


def test_clients_time_out_unless_the_user_chose_other_timeouts() -> None:
    factory = _http._GLOBAL_CLIENT_FACTORY
    with uploading(5.0):
        assert get_session().timeout.as_dict() == {"connect": 5.0, "read": 5.0, "write": 5.0, "pool": None}
        close_session()  # as huggingface_hub does after it failed to connect
        get_session().timeout.read = 70.0
        with uploading(60.0):
            assert get_session().timeout.as_dict() == {"connect": 5.0, "read": 70.0, "write": 5.0, "pool": None}
    assert _http._GLOBAL_CLIENT_FACTORY is factory
