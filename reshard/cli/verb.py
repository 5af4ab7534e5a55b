"""A command: its errors name flags where those of the Python API name parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import click

from manifests.command.grouped_help import GroupedHelp
from manifests.errors import flag_like, naming_flags


class Verb(GroupedHelp, click.Command):
    """A command that calls a function of the Python API; its options are called like the function's parameters."""

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> None:
        super().__init__(*args, groups=groups or {}, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        group = ctx.find_root().command
        others = group.commands.values() if isinstance(group, click.Group) else ()
        with naming_flags(partial(flag_of, (self, *others))):
            return super().invoke(ctx)


def flag_of(verbs: Iterable[click.Command], parameter: str) -> str:
    """Return the flag of the first of the commands that has it: `--bytes` for `reads_bytes`."""
    name = parameter.rpartition(".")[2]
    flags = (option.opts[0] for verb in verbs for option in verb.params if option.name == name)
    return next((flag for flag in flags if flag.startswith("-")), flag_like(parameter))
