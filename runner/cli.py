"""The runner command: checks what can be checked without torch, then hands over to torchrun."""

from __future__ import annotations

import sys

import click

from manifests.errors import UserError, error_json
from runner.launch.command import cancel, launch, logs, report, status
from runner.reading.verbs import eval_command, generate_command

__all__ = ["main"]

_PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(context_settings=_PLAIN)
@click.version_option(package_name="reshard", prog_name="runner")
def cli() -> None:
    """Train a packed model, each rank holding only its own pipeline stages.

    \b
    Example:
      runner launch ./Llama-3.2-1B-pp2 -- --steps 100 --seq-len 512 --global-batch 16 --data text/
    """


for _command in (launch, status, logs, cancel, report, eval_command, generate_command):
    cli.add_command(_command)


def main() -> None:
    """Run the command; end with its exit code."""
    wants_json = "--json" in sys.argv[1:]
    try:
        cli.main(prog_name="runner", standalone_mode=False)
    except UserError as error:
        click.echo(error_json(error) if wants_json else f"error: {error}", err=not wants_json)
        sys.exit(error.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)


if __name__ == "__main__":
    main()
