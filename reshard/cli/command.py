"""The reshard command: a skin over the verbs. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from manifests.console import run_command
from manifests.errors import UsageError
from reshard.cli.pack import export, pack
from reshard.cli.pack_parts import commit
from reshard.cli.plan import layout, plan
from reshard.cli.verify import diff, inspect, verify

__all__ = ["cli", "run"]

_PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(context_settings=_PLAIN)
@click.version_option(package_name="reshard", prog_name="reshard")
def cli() -> None:
    """Cut a Hugging Face checkpoint into pipeline stages, and put it together again.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2
    """


for verb in (plan, layout, pack, commit, export, verify, inspect, diff):
    cli.add_command(verb)


def run(begin: Callable[[], None] = lambda: None) -> None:
    """Run the command; end with its exit code. `begin` is called where an interrupt can be handled."""
    is_json = "--json" in sys.argv[1:]
    run_command(lambda: _run(begin, is_json=is_json), is_json=is_json)


def _run(begin: Callable[[], None], *, is_json: bool) -> int:
    try:
        begin()
        cli.main(prog_name="reshard", standalone_mode=False)
    except click.exceptions.Abort as error:
        raise (error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else KeyboardInterrupt()) from None
    except click.ClickException as error:
        if is_json:
            told = error.param if isinstance(error, click.BadParameter) else None
            at = "" if told is None else told.opts[0] if isinstance(told, click.Option) else told.human_readable_name
            raise UsageError(at, error.format_message(), "see --help", code="usage.arguments") from error
        error.show()
        return UsageError.exit_code
    return 0
