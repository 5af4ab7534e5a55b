"""A process that builds a model, forked from a test that has imported torch and transformers: starting it takes 7 s."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from reshard.estimate import meta_model


class _Forked(subprocess.Popen[str]):
    def __init__(self, command: Sequence[str], pass_fds: Collection[int] = (), **options: Any) -> None:
        super().__init__(command, pass_fds=pass_fds, preexec_fn=lambda: _run(command, {0, 1, 2, *pass_fds}), **options)


def _run(command: Sequence[str], kept: set[int]) -> NoReturn:
    """Run the module of `python -m MODULE ARGUMENTS`, where Python would be started."""
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with suppress(OSError):
            os.close(descriptor)
    code = 1
    try:
        sys.argv = [*command[command.index("-m") + 1 :]]
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        meta_model.main()
        sys.stdout.flush()
        code = 0
    finally:
        os._exit(code)


@pytest.fixture
def forked_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests here start the process as the commands do."""
    monkeypatch.setattr(subprocess, "Popen", _Forked)
