"""Standard streams that are full, closed, broken off or ASCII: a sentence and a code, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.builders import llama_config, pack, reshard, write_model

ROOT = Path(__file__).parents[4]
FULL = Path("/dev/full")
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("streams")
    write_model(place / "source", llama_config(tie_word_embeddings=True))
    pack(place / "source", place / "packed")
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> Callable[[str], subprocess.CompletedProcess[bytes]]:
    """Return what a command does on streams that take everything."""
    return cache(lambda command: run(command, place))


def run(script: str, place: Path, keep: tuple[int, ...] = (), **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of a shell, in which RESHARD and RUNNER are the commands."""
    names = {"RESHARD": f"{sys.executable} -m reshard", "RUNNER": f"{sys.executable} -m runner.cli"}
    settings = {**os.environ, **names, "PYTHONPATH": str(ROOT), **environment}
    command = ["bash", "-c", script]
    return subprocess.run(command, cwd=place, env=settings, capture_output=True, timeout=60, pass_fds=keep)


COMMANDS = (
    "$RESHARD plan source --layout pp=2",
    "$RESHARD plan source --layout pp=2 --json",
    "$RESHARD layout pp=2 --layers 4",
    "$RESHARD inspect packed",
    "$RESHARD verify packed",
    "$RESHARD diff packed packed",
    "$RESHARD --help",
    "$RESHARD --version",
    "$RESHARD pack source --layout pp=2 --out dry --dry-run",
    "$RUNNER launch packed --dry-run -- --data synthetic --quiet",
    "$RUNNER launch packed -- --help",
    "$RUNNER --help",
)


# One for each way to print; the others, which print as one of them does, are slow.
FEW = (*COMMANDS[:2], COMMANDS[3], COMMANDS[9], COMMANDS[11])
ALL = [pytest.param(command, marks=() if command in FEW else pytest.mark.slow) for command in COMMANDS]


@pytest.mark.parametrize("command", ALL)
@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_full_standard_output_is_said_with_code_3(command: str, place: Path) -> None:
    done = run(f"{command} >{FULL}", place)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith(b"error: standard output: ")
    error, hint = done.stderr.splitlines()
    assert b"[output.disk-full]" in error
    assert hint.startswith(b"hint: ")


@pytest.mark.parametrize("command", ALL[:3] + ALL[-3:])
def test_closed_standard_output_is_said_with_code_3(command: str, place: Path) -> None:
    done = run(f"{command} >&-", place)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith(b"error: standard output: ")


@pytest.mark.parametrize("command", ALL[:3] + ALL[-3:])
def test_reader_that_has_gone_ends_a_command_as_sigpipe_does_and_without_a_word(command: str, place: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(f"{command} >&{writer}", place, keep=(writer,))
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


CODES = {
    "$RESHARD layout pp=2 --layers 4": 0,
    "$RESHARD layout pp=5 --layers 2": 2,
    "$RESHARD plan gone --layout pp=2": 3,
    "$RESHARD plan --nothing": 2,
    "$RUNNER launch gone -- --data synthetic": 3,
    "$RUNNER nothing": 2,
}
SILENT = ("2>&-", "<&- 2>&-", "2>/dev/full")


@pytest.mark.parametrize(
    ("command", "code", "streams"),
    [
        pytest.param(*case, SILENT[(row + turn) % 3], marks=pytest.mark.slow if turn else ())
        for row, case in enumerate(CODES.items())
        for turn in range(3)
    ],
)
def test_standard_error_that_takes_nothing_changes_no_code(
    command: str, code: int, streams: str, place: Path, whole: Callable[[str], subprocess.CompletedProcess[bytes]]
) -> None:
    silent = run(f"{command} {streams}", place)
    assert whole(command).returncode == code, whole(command).stderr
    assert (silent.returncode, silent.stdout) == (code, whole(command).stdout)


def test_files_never_take_the_place_of_a_stream_that_is_closed(place: Path) -> None:
    done = run("$RESHARD pack source --layout pp=2 --out closed >&- 2>&- <&-", place)
    assert done.returncode in (0, 3)
    expected = sorted(path.relative_to(place / "packed") for path in (place / "packed").rglob("*"))
    assert sorted(path.relative_to(place / "closed") for path in (place / "closed").rglob("*")) == expected
    assert reshard("verify", place / "closed").code == 0


@pytest.mark.parametrize("flag", ["", "--json"])
def test_names_that_an_ascii_terminal_cannot_show_are_escaped(flag: str, place: Path) -> None:
    (place / "é").mkdir(exist_ok=True)
    done = run(f"$RESHARD plan 'é' --layout pp=2 {flag}", place, **ASCII)
    assert done.returncode == 3, done.stderr
    assert b"Traceback" not in done.stderr
    if flag:
        assert json.loads(done.stdout)["error"]["where"]
