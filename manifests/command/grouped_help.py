"""Help of a command with its options in groups, what people use first at the top; click is the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class GroupedHelp:
    """Mixed into a `click.Command`: `groups` are the titles, and the names of the parameters below each.

    Parameters of no group come last, under "Options".
    """

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.groups = groups

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options as click does, a section for each group."""
        command: Any = self
        options = (parameter for parameter in command.get_params(ctx) if parameter.param_type_name == "option")
        records = {option.name: option.get_help_record(ctx) for option in options}
        sections = {title: [records.pop(name, None) for name in names] for title, names in self.groups.items()}
        for title, listed in {**sections, "Options": [*records.values()]}.items():
            if rows := [record for record in listed if record is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)
