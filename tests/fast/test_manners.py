"""What every command has in common: --quiet, completion of paths, suggestions, exit codes of typing errors."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from manifests.command.console import MOVED
from reshard.cli import main as reshard_main
from reshard.cli.command import cli as reshard_cli
from runner.cli import main as runner_main
from runner.commands import cli as runner_cli
from runner.config.flags import training_command
from tests.builders import llama_config, reshard, write_model
from tests.fast.reshard.configs import write_config

WORDS = {
    "reshard": [
        ("plan",), ("pack",), ("pack", "x", "--out"), ("pack", "x", "--layout"), ("export",), ("verify",),
        ("verify", "x", "--against"), ("inspect",), ("diff",), ("diff", "a"), ("commit",), ("plan", "x", "--draw"),
    ],
    "runner": [
        ("launch",), ("launch", "--job"), ("launch", "--log-dir"), ("eval",), ("eval", "x", "--data"),
        ("status",), ("logs",), ("cancel",), ("report",), ("report", "x", "--out"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "words"), [(command, words) for command, several in WORDS.items() for words in several]
)
def test_completion_offers_paths_wherever_one_is_meant(command: str, words: tuple[str, ...]) -> None:
    group = reshard_cli if command == "reshard" else runner_cli
    completer = ShellComplete(group, {}, command, f"_{command.upper()}_COMPLETE")
    assert [item.type for item in completer.get_completions(list(words), "")] in (["file"], ["dir"])


def test_flags_of_training_that_name_paths_are_paths() -> None:
    names = {"data", "eval_data", "checkpoint", "resume", "save", "log_dir", "stage_to_local", "schedule"}
    paths = {option.name for option in training_command.params if isinstance(option.type, click.Path)}
    assert paths == names


@pytest.mark.parametrize("removed", MOVED)
def test_what_was_removed_is_refused_with_what_to_use_instead(
    removed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *words = removed.split() if " " in removed else ("reshard", "inspect", removed)
    monkeypatch.setattr("sys.argv", [command, *words, "--json"])
    with pytest.raises(SystemExit) as ended:
        (reshard_main if command == "reshard" else runner_main)()
    error = json.loads(capsys.readouterr().out)["error"]
    assert (ended.value.code, error["code"], error["where"]) == (2, "usage.moved", removed)


@pytest.mark.parametrize(
    ("typed", "meant"), [("lanuch", "launch"), ("statsu", "status"), ("evla", "eval"), ("reprot", "report")]
)
def test_verb_with_a_typing_error_is_suggested(typed: str, meant: str) -> None:
    done = CliRunner().invoke(runner_cli, [typed])
    assert done.exit_code == 2
    assert f"'{meant}'" in done.output


def test_layout_and_schedule_with_typing_errors_are_usage_errors_alike(tmp_path: Path) -> None:
    config = write_config(tmp_path / "tiny.json")
    for words in (("--layout", "p=2"), ("--layout", "pp=2,vp=3"), ("--layout", "pp=2", "--schedule", "1F1C")):
        assert reshard("plan", config, *words).code == 2, words
    (tmp_path / "layout.toml").write_text("stages = 7\n")
    assert reshard("plan", config, "--layout", tmp_path / "layout.toml").code == 3


def test_quiet_verbs_print_nothing_when_all_is_well(tmp_path: Path) -> None:
    write_model(tmp_path / "source", llama_config())
    out = tmp_path / "out"
    for words in (
        ("pack", tmp_path / "source", "--layout", "pp=2", "--out", out),
        ("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "parts", "--part", "1/1"),
        ("commit", tmp_path / "parts"),
        ("verify", out),
        ("export", out, "--to", "hf", "--out", tmp_path / "again"),
    ):
        ended = reshard(*words, "--quiet")
        assert (ended.code, ended.out, ended.err) == (0, "", ""), words


@pytest.mark.parametrize("group", [reshard_cli, runner_cli], ids=["reshard", "runner"])
def test_every_verb_that_works_long_can_be_quiet(group: click.Group) -> None:
    context = click.Context(group)
    short = {"status", "logs", "cancel", "report", "completion"}  # their answer is all they print
    for name in set(group.list_commands(context)) - short:
        command = group.get_command(context, name)
        assert command is not None
        assert "--quiet" in {flag for option in command.params for flag in option.opts}, name


@pytest.mark.parametrize("group", [reshard_cli, runner_cli], ids=["reshard", "runner"])
def test_list_of_verbs_says_what_each_does_in_a_whole_line(group: click.Group) -> None:
    listed = CliRunner().invoke(group, ["--help"], terminal_width=80).output.partition("Commands:\n")[2].splitlines()
    assert len(listed) == len(group.list_commands(click.Context(group)))
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)
