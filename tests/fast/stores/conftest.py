"""A hub on loopback, which huggingface_hub is set up to read from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.hub import Hub, serve_hub, set_up


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        set_up(monkeypatch, hub, tmp_path / "cache")
        yield hub
