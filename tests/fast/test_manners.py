"""What every command has in common: --quiet, completion of paths, suggestions, exit codes of typing errors."""

from __future__ import annotations

import colorsys
import json
import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from manifests.command import palette
from manifests.command.console import MOVED
from manifests.command.neighbors import NEIGHBORS
from manifests.command.palette import KIND_COLORS, MEMORY_COLORS, THEMES, WORK_COLORS, contrast, ink_on, tint
from manifests.errors import UsageError
from reshard.cli import main as reshard_main
from reshard.cli.command import cli as reshard_cli
from runner.cli import main as runner_main
from runner.commands import cli as runner_cli
from runner.config.flags import parse_training, training_command
from tests.builders import llama_config, reshard, write_model

WORDS = {
    "reshard": [
        ("plan",), ("pack",), ("pack", "x", "--out"), ("pack", "x", "--layout"), ("export",), ("verify",),
        ("verify", "x", "--against"), ("inspect",), ("diff",), ("diff", "a"), ("commit",), ("plan", "x", "--draw"),
    ],
    "runner": [
        ("launch",), ("launch", "--job"), ("launch", "--log-dir"), ("eval",), ("eval", "x", "--data"),
        ("status",), ("list",), ("logs",), ("cancel",), ("report",), ("report", "x", "--out"),
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
    names = {
        "data",
        "eval_data",
        "checkpoint",
        "resume",
        "save",
        "log_dir",
        "stage_to_local",
        "schedule",
        "adapter",
        "publish",
    }
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


def misuse(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the error of a command that is refused as misused."""
    monkeypatch.setattr("sys.argv", [*words, "--json"] if "--" not in words else words)
    with pytest.raises(SystemExit) as ended:
        (reshard_main if words[0] == "reshard" else runner_main)()
    assert ended.value.code == 2
    error: dict[str, str] = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "usage.arguments"
    return error


@pytest.mark.parametrize("program", NEIGHBORS)
def test_words_of_other_tools_are_answered_with_ours(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = reshard_cli if program == "reshard" else runner_cli
    verbs = [group.get_command(click.Context(group), name) for name in group.list_commands(click.Context(group))]
    flags = {
        flag
        for verb in (*verbs, training_command)
        if verb
        for param in verb.params
        for flag in (*param.opts, *param.secondary_opts)
    }
    for word, answer in NEIGHBORS[program].items():
        if word.startswith("-"):
            assert word not in flags or program == "reshard", word
            assert not {*re.findall(r"(?<= )--[a-z0-9-]+", f" {answer}")} - flags - {"--layout"}, word
        else:
            if word in group.list_commands(click.Context(group)):
                continue  # of the other program's table
            assert misuse([program, word], monkeypatch, capsys)["hint"].startswith(answer)
            assert answer.split()[0] in ("reshard", "runner"), word
            other = reshard_cli if answer.startswith("reshard") else runner_cli
            assert answer.split()[1].strip(",;") in other.list_commands(click.Context(other)), word


@pytest.mark.parametrize("word", [word for word in NEIGHBORS["runner"] if word.startswith("-")])
def test_training_flags_of_other_tools_are_answered_with_ours(word: str) -> None:
    for spelled in (word, word.replace("-", "_").replace("__", "--", 1)):
        with pytest.raises(UsageError) as error:
            parse_training([spelled, "1"])
        assert error.value.where == spelled
        assert NEIGHBORS["runner"][word] in error.value.hint


@pytest.mark.parametrize("program", ["reshard", "runner"])
def test_command_alone_shows_its_help(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [program])
    with pytest.raises(SystemExit) as ended:
        (reshard_main if program == "reshard" else runner_main)()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"Usage: {program}")


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
    short = {"status", "list", "logs", "cancel", "report", "completion", "log"}  # their answer is all they print
    verbs = {name: group.get_command(context, name) for name in group.list_commands(context)}
    for name, verb in [*verbs.items()]:
        if isinstance(verb, click.Group):
            verbs |= verbs.pop(name).commands  # type: ignore[union-attr]
    for name, command in verbs.items():
        if name in short:
            continue
        assert command is not None
        assert "--quiet" in {flag for option in command.params for flag in option.opts}, name


@pytest.mark.parametrize("group", [reshard_cli, runner_cli], ids=["reshard", "runner"])
def test_list_of_verbs_says_what_each_does_in_a_whole_line(group: click.Group) -> None:
    listed = CliRunner().invoke(group, ["--help"], terminal_width=80).output.partition("Commands:\n")[2].splitlines()
    assert len(listed) == len(group.list_commands(click.Context(group)))
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


BIN = Path(sys.executable).parent


def asked(program: str, *words: str) -> list[str]:
    """Return what bash is answered at the end of these words: kind and value."""
    environment = {f"_{program.upper()}_COMPLETE": "bash_complete", "COMP_WORDS": " ".join((program, *words))}
    ended = subprocess.run(
        [BIN / program], env={**os.environ, **environment, "COMP_CWORD": str(len(words))}, capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("program", "words", "answers"),
    [
        ("reshard", ("ver",), ["plain,verify"]),
        ("reshard", ("export", "x", "--to", "d"), ["plain,dcp", "plain,deepspeed"]),
        ("runner", ("launch", "--scheduler", "s"), ["plain,slurm"]),
        ("runner", ("launch", "x", "--", "--global"), ["plain,--global-batch"]),
        ("runner", ("launch", "x", "--", "--data", "t"), ["file,t"]),
    ],
)
def test_verbs_flags_choices_and_paths_are_completed(program: str, words: tuple[str, ...], answers: list[str]) -> None:
    assert asked(program, *words) == answers


MEANINGS = {*KIND_COLORS.values(), *MEMORY_COLORS.values(), *(color for _, color in WORK_COLORS.values())}
PANELS = (tuple(KIND_COLORS.values()), tuple(color for _, color in WORK_COLORS.values()), tuple(MEMORY_COLORS.values()))
# Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency (2009), table 1.
BLIND = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(color: str) -> list[float]:
    parts = [byte / 255 for byte in bytes.fromhex(color[1:])]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    """CIELAB of linear sRGB, D65. Source: IEC 61966-2-1 and CIE 15."""
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    whole = (0.9505, 1.0, 1.089)
    x, y, z = (
        (lambda t: t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116)(
            max(0.0, sum(a * b for a, b in zip(row, rgb, strict=True))) / white
        )
        for row, white in zip(rows, whole, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_text_has_a_contrast_of_at_least_4_5(theme: palette.Theme) -> None:
    for text in (theme.ink, theme.quiet, theme.alarm):
        for ground in (theme.paper, theme.faint):
            assert contrast(text, ground) >= 4.5, (text, ground)


@pytest.mark.parametrize("shade", [0.0, 0.2, 0.4, 0.6])
def test_numbers_in_boxes_have_a_contrast_of_at_least_4_5(shade: float) -> None:
    for color in MEANINGS:
        assert contrast(ink_on(tint(color, shade)), tint(color, shade)) >= 4.5, color


def test_red_is_for_alarm_only() -> None:
    def is_red(color: str) -> bool:
        hue, _, saturation = colorsys.rgb_to_hls(*(byte / 255 for byte in bytes.fromhex(color[1:])))
        return saturation > 0.4 and not 0.055 < hue < 0.92

    assert [color for color in MEANINGS if is_red(color)] == []
    assert all(is_red(theme.alarm) for theme in THEMES.values())


def test_a_hue_has_one_meaning() -> None:
    hues = [
        [
            hue
            for color in panel
            for hue, _, saturation in [colorsys.rgb_to_hls(*(byte / 255 for byte in bytes.fromhex(color[1:])))]
            if saturation > 0.2
        ]
        for panel in (*PANELS, (palette.PURPLE,))
    ]
    for some, others in combinations(hues, 2):
        assert min(abs(one - other) for one in some for other in others) > 0.08


@pytest.mark.parametrize("blindness", BLIND)
def test_colors_of_a_panel_differ_with_any_color_blindness(blindness: str) -> None:
    for panel in PANELS:
        for one, other in combinations(panel, 2):
            seen = [
                lab([sum(a * b for a, b in zip(row, linear(color), strict=True)) for row in BLIND[blindness]])
                for color in (one, other)
            ]
            distance = sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5
            assert distance > 10, (one, other, distance)
