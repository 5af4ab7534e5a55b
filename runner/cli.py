"""The runner command: checks what can be checked without torch, then hands over to torchrun."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from manifests.errors import UserError, error_json

__all__ = ["main"]

_PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
# Where each verb is, and what the list of them says.
_VERBS = {
    "launch": ("runner.launch.command:launch", "Train a packed model, here or on the nodes of a cluster."),
    "status": ("runner.launch.verbs:status", "Say what a launched job does, or why it failed."),
    "logs": ("runner.launch.verbs:logs", "Print what a launched job has printed."),
    "cancel": ("runner.launch.verbs:cancel", "End a launched job; one that saves checkpoints saves first."),
    "report": ("runner.launch.verbs:report", "Draw a run as one HTML page."),
    "eval": ("runner.reading.verbs:eval_command", "Print a packed model's loss over a text."),
    "generate": ("runner.reading.verbs:generate_command", "Print what a packed model writes after a prompt."),
}


class _Verbs(click.Group):
    """Verbs of which only the one that is asked for is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module, _, name = _VERBS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, said) for name, (_, said) in _VERBS.items()])


@click.group(cls=_Verbs, context_settings=_PLAIN)
@click.version_option(package_name="reshard", prog_name="runner")
def cli() -> None:
    """Train a packed model, each rank holding only its own pipeline stages.

    \b
    Example:
      runner launch ./Llama-3.2-1B-pp2 -- --steps 100 --seq-len 512 --global-batch 16 --data text/
    """


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
