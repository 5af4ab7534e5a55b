"""Every command in README, docs and help exists, with every flag that it is shown with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from reshard.cli.command import cli as reshard
from reshard.cli.delta import delta
from runner.commands import cli as runner
from runner.config.flags import training_command

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
_COMMAND = re.compile(r"^(?:(?:    |\t)\s*|\$ )((?:reshard|runner) (?!\[)[a-z].*)$")
_PROSE = re.compile(r"\s{3,}\S.*$|\s…|\s>\s.*$|\s#.*$")  # what follows a command


def commands_in(text: str) -> Iterator[str]:
    """Yield the commands in indented blocks, with their continued lines."""
    lines = iter(text.splitlines())
    for line in lines:
        if (found := _COMMAND.match(line)) and "[OPTIONS]" not in line:
            command = found[1]
            while command.endswith("\\"):
                command = command[:-1] + next(lines).strip()
            yield _PROSE.sub("", command)


def unknown_in(command: str) -> str | None:
    """Return what click says of a command's verb and flags; None: it has them all."""
    program, verb, *words = shlex.split(command)
    words = words[: next((n for n, word in enumerate(words) if word in ("|", ">", "&&", "||")), len(words))]
    group = reshard if program == "reshard" else runner
    found = group.get_command(click.Context(group), verb)
    if found is None:
        return f"no such command {verb}"
    own, training = words, []
    if verb == "launch" and "--" in words:
        own, training = words[: words.index("--")], words[words.index("--") + 1 :]
    for part, given in ((found, own), (training_command, training)):
        if {"--help", "-h"} & {*given}:
            continue
        try:
            part.make_parser(click.Context(part)).parse_args([*given])
        except click.UsageError as error:
            return error.format_message()
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist_with_their_flags(page: Path) -> None:
    shown = list(commands_in(page.read_text()))
    assert {command: problem for command in shown if (problem := unknown_in(command))} == {}


def test_examples_of_slurm_ask_for_gpus() -> None:
    """Without, ranks may get none, and train a large model on CPUs."""
    shown = [command for page in PAGES for command in commands_in(page.read_text())]
    launches = [command for command in shown if command.startswith("runner launch") and "--scheduler slurm" in command]
    assert len(launches) >= 2
    assert [command for command in launches if "--sbatch-arg=--gpus-per-node=" not in command] == []


OF_OTHERS = {
    "--ckpt-format", "--dist-ckpt-optim-fully-reshardable", "--help", "--inject", "--load-format", "--mem",
    "--use-distributed-optimizer",
}  # fmt: skip


def test_flags_of_errors_exist() -> None:
    verbs = [*reshard.import_verbs(), *delta.commands.values(), *runner.import_verbs()]
    params = [param for command in (*verbs, training_command) if command for param in command.params]
    flags = {flag for param in params for flag in (*param.opts, *param.secondary_opts)} | OF_OTHERS
    named = {
        (path.name, flag)
        for path in (ROOT / "docs" / "errors").glob("*.toml")
        for flag in re.findall(r"--[a-z0-9]+(?:-[a-z0-9]+)*", path.read_text())
    }
    assert {flag for _, flag in named} >= {"--tokenized", "--part"}
    assert [(page, flag) for page, flag in sorted(named) if flag not in flags] == []


@pytest.mark.parametrize(
    "command",
    ["reshard pck x", "reshard pack x --layuot pp=2", "runner launch x -- --stepps 3", "runner launch --nnode"],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert unknown_in(command) is not None
