"""What torchrun is started with on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest

from runner.launch.here import launch_here


def test_flags_that_another_job_leaves_in_the_environment_do_not_reach_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With PET_NNODES=2 it would wait for a second node, and with PET_MAX_RESTARTS start ranks again by itself."""
    started: list[Mapping[str, str]] = []

    def start(path: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        started.append(environment)

    monkeypatch.setattr(os, "execve", start)
    for name in ("PET_NNODES", "PET_MAX_RESTARTS", "OF_THE_USER"):
        monkeypatch.setenv(name, "2")
    launch_here(("packed",), nproc_per_node=1, dry_run=False)
    (environment,) = started
    assert [name for name in environment if name.startswith("PET_")] == []
    assert environment["OF_THE_USER"] == "2"
