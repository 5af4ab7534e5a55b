"""What our commands leave out of the environment of processes that start Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from manifests.command.interpreter import leave_out_working_folder, module_command, safe_environment


@pytest.mark.parametrize(
    ("given", "safe"),
    [
        ("/a:/b", "/a:/b"),
        (":/a", "/a"),
        ("/a::/b:", "/a:/b"),
        (".:/a:src:../b", "/a"),
        ("", ""),
        (":", ""),
    ],
)
def test_pythonpath_has_only_absolute_entries(given: str, safe: str) -> None:
    assert safe_environment({"PYTHONPATH": given, "A": "b"}) == {"PYTHONPATH": safe, "A": "b", "PYTHONSAFEPATH": "1"}


def test_environment_without_pythonpath_gets_none() -> None:
    assert safe_environment({}) == {"PYTHONSAFEPATH": "1"}


def test_modules_are_run_without_the_working_folder() -> None:
    assert list(module_command("a.b", "c", python="python3")) == ["python3", "-P", "-m", "a.b", "c"]


def test_relative_entries_leave_the_path_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for relative in ("", ".", "src"):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((relative, "/modules")))
        monkeypatch.setattr(sys, "path", [str((tmp_path / relative).resolve()), "/modules", "/lib"])
        leave_out_working_folder()
        assert sys.path == ["/modules", "/lib"]
