"""What both commands share: sizes of memory, which have one reading everywhere, and the environment of processes."""

from __future__ import annotations

import os
import re
import sys
from io import StringIO
from pathlib import Path

import pytest

from manifests.command.console import expand_home, print_error
from manifests.command.interpreter import leave_out_working_folder, module_command, safe_environment
from manifests.command.sizes import parse_size, read_size
from manifests.errors import UsageError


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


def test_modules_are_run_without_the_working_folder() -> None:
    assert list(module_command("a.b", "c", python="python3")) == ["python3", "-P", "-m", "a.b", "c"]


def test_relative_entries_leave_the_path_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for relative in ("", ".", "src"):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((relative, "/modules")))
        monkeypatch.setattr(sys, "path", [str((tmp_path / relative).resolve()), "/modules", "/lib"])
        leave_out_working_folder()
        assert sys.path == ["/modules", "/lib"]


@pytest.mark.parametrize("word", ["--out=~/x", "~/x", "~", "--data=~/texts/*.txt"])
def test_home_is_expanded_where_shells_do_not(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_home(word) == word.replace("~", str(tmp_path))


@pytest.mark.parametrize("text", ["80GB", "80GiB", "80G", "80 GB", "80gib", "80g", "0.078125TB", str(80 << 30)])
def test_memory_of_an_80_gb_card_is_one_number_however_it_is_written(text: str) -> None:
    assert parse_size(text) == 80 << 30


@pytest.mark.parametrize("text", ["80", "1048575", "79.5", "0", "0GB", "-1GB", "1e9", "80iB", "GB", "", "80 apples"])
def test_number_that_has_no_unit_or_is_no_size_is_refused(text: str) -> None:
    assert parse_size(text) is None
    with pytest.raises(UsageError) as error:
        read_size("--gpu-memory", text)
    assert (error.value.code, error.value.where) == ("options.memory-size", "--gpu-memory")


@pytest.mark.parametrize(
    ("is_terminal", "variables", "is_colored"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_errors_have_color_on_a_terminal_unless_it_is_unwanted(
    is_terminal: bool, variables: dict[str, str], is_colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = print_error(UsageError("--lr", "is wrong", "fix it", code="usage.arguments"), is_json=False)
    assert code == UsageError.exit_code
    assert ("\x1b[" in stream.getvalue()) == is_colored
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert plain == "error: --lr: is wrong [usage.arguments]\nhint: fix it\n"
