"""The page on commands: each of reshard and runner with its flags, from click, for `tools/site.py`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from reshard.cli.command import cli as reshard
from runner.commands import cli as runner
from runner.config.flags import training_command

_HEAD = """\
# Commands

Every command and flag, as `--help` has them. Exit codes: 0 done, 1 a bug in this software, 2 usage, 3 bad input,
4 verification differs, 5 a rank failed, 130 interrupted, 141 the reader of standard output has exited.
"""


def render() -> str:
    """Return the page."""
    sections = [_HEAD]
    for name, group in (("reshard", reshard), ("runner", runner)):
        context = click.Context(group, info_name=name, show_default=True)
        for verb in group.list_commands(context):
            command = group.get_command(context, verb)
            assert command is not None, verb
            inner = click.Context(command, info_name=verb, parent=context)
            sections.append("\n".join(_section(command, inner)))
            if verb == "launch":
                training = click.Context(training_command, info_name="--", parent=inner)
                sections.append("\n".join(_section(training_command, training)))
    return "\n".join(sections)


def _section(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## {context.command_path}\n"
    yield f"    {context.command_path} {' '.join(command.collect_usage_pieces(context))}\n"
    yield from _paragraphs(inspect.cleandoc(command.help or ""))
    flags = [record for option in command.params if (record := option.get_help_record(context)) and record[1]]
    if flags:
        yield "| Flag | Meaning |\n|---|---|"
        yield from (f"| `{_cell(flag)}` | {_cell(meaning)} |" for flag, meaning in flags)
        yield ""


def _paragraphs(text: str) -> Iterator[str]:
    """Yield click's help as Markdown: a paragraph that begins with a form feed's mark keeps its lines."""
    for paragraph in text.split("\n\n"):
        keeps = paragraph.startswith("\b\n")
        lines = paragraph.removeprefix("\b\n").splitlines()
        yield "\n".join(f"    {line}" for line in lines) + "\n" if keeps else _escaped(" ".join(lines)) + "\n"


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")
