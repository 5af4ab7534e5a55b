"""The reshard command: a skin over the verbs. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import sys

import click

from manifests.errors import InputError, UserError, error_json
from reshard.commands.parts import commit
from reshard.commands.planning import layout, plan
from reshard.commands.reading import diff, inspect, verify
from reshard.commands.writing import export, pack

__all__ = ["main"]

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


def main() -> None:
    """Run the command; end with its exit code."""
    wants_json = "--json" in sys.argv[1:]
    try:
        try:
            cli.main(prog_name="reshard", standalone_mode=False)
        except OSError as error:
            if error.filename is None:
                raise
            raise InputError(str(error.filename), f"cannot be used: {error.strerror}") from error
    except UserError as error:
        _fail(error_json(error) if wants_json else f"error: {error}", wants_json, error.exit_code)
    except click.exceptions.Abort:
        _fail("interrupted", False, 130)
    except KeyboardInterrupt:
        _fail("interrupted", False, 130)
    except click.ClickException as error:
        if wants_json:
            shown = UserError("", error.format_message(), "see --help")
            _fail(error_json(shown), True, 2)
        error.show()
        sys.exit(2)


def _fail(text: str, on_stdout: bool, code: int) -> None:
    click.echo(text, err=not on_stdout)
    sys.exit(code)


if __name__ == "__main__":
    main()
