"""A manifest does not decide which servers are asked: whoever runs the command does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manifests.errors import InputError
from stores.base import read_whole
from stores.objects import open_objects
from stores.remote import ALLOW_VARIABLE, check_remote
from tests.builders import reshard, write_model
from tests.process.test_filesystem_client import WithRanges, serve

pytestmark = pytest.mark.process


class Logged(WithRanges):
    """A server of files that counts what it is asked for."""

    asked: list[str] = []  # noqa: RUF012 - of the class: each request has a handler of its own

    def send_head(self) -> Any:
        self.asked.append(self.path)
        return super().send_head()


class Redirecting(WithRanges):
    """A server that sends everybody to a cloud's metadata."""

    def send_head(self) -> Any:
        self.send_response(302)
        self.send_header("Location", "http://169.254.169.254/latest/meta-data/")
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    write_model(tmp_path / "web" / "model", num_shards=2)
    Logged.asked.clear()
    with serve(tmp_path / "web", Logged) as address:
        yield f"{address}/model"


@pytest.mark.parametrize("verb", [("inspect", "--tensors"), ("verify",), ("plan",), ("diff",), ("pack",), ("export",)])
def test_server_of_virtual_bundles_is_asked_with_consent_only(
    tmp_path: Path, address: str, verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    assert reshard("pack", address, "--layout", "pp=2", "--virtual", "--out", packed).code == 0  # named by the user
    given: tuple[str | Path, ...] = {
        "diff": (packed,), "pack": ("--out", out), "export": ("--to", "hf", "--out", out)
    }.get(verb[0], ())  # fmt: skip
    command = (verb[0], packed, *verb[1:], *given)
    Logged.asked.clear()
    refused = reshard(*command, "--json")
    assert refused.code == 3, refused.err
    assert refused.json["error"]["code"] == "source.remote-not-allowed"
    assert address.removesuffix("/model") in refused.json["error"]["problem"]
    assert Logged.asked == []
    assert reshard(*command, "--allow-remote").code == 0
    assert Logged.asked != []
    assert reshard(*command, "--json", *(["--force"] if out.exists() else [])).code == 3  # it was said once


def test_ranks_of_a_job_are_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as refused:
        check_remote("http://192.0.2.7/model", "/packed")
    assert refused.value.code == "source.remote-not-allowed"
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    check_remote("http://192.0.2.7/model", "/packed")


@pytest.mark.parametrize(
    ("location", "named"),
    [
        ("/models/a", "/packed"),
        ("hf://org/name", "/packed"),
        ("s3://bucket/a", "/packed"),
        ("https://192.0.2.7/a", "https://192.0.2.7/b"),
    ],
)
def test_places_that_the_user_configured_or_named_need_no_consent(location: str, named: str) -> None:
    check_remote(location, named)


def test_redirect_of_a_web_server_to_metadata_is_not_followed(tmp_path: Path) -> None:
    with serve(tmp_path, Redirecting) as address, pytest.raises(InputError) as refused:
        read_whole(open_objects(address).file("config.json"))
    assert refused.value.code == "store.redirect-refused"
