"""The commands of runner, each imported when it is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click

from manifests.command.console import LazyGroup, run_cli

_PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
# Where each command is, and its line in the list of commands.
_VERBS = {
    "launch": ("runner.launch.command:launch", "Train a packed model, here or on the nodes of a cluster."),
    "status": ("runner.launch.verbs:status", "Show the state of a launched job, or why it failed."),
    "list": ("runner.launch.verbs:list_runs", "List the runs of a folder: state, step, loss, last heartbeat."),
    "logs": ("runner.launch.verbs:logs", "Print the output of a launched job."),
    "cancel": ("runner.launch.verbs:cancel", "Cancel a launched job, with a last checkpoint if it saves any."),
    "measure": ("runner.measure.command:measure", "Measure the seconds of each module, for reshard's --cost."),
    "report": ("runner.launch.verbs:report", "Write a run as one HTML page."),
    "eval": ("runner.evaluation.command:eval_command", "Print a packed model's loss over a text."),
    "prove": ("runner.proof.command:prove", "Prove that a run trains as one process does."),
    "completion": ("runner.commands:completion", "Print the shell completion script of bash, zsh or fish."),
}


class _Group(LazyGroup, click.Group): ...


@click.group(cls=_Group, verbs=_VERBS, context_settings=_PLAIN)
@click.version_option(package_name="reshard", prog_name="runner")
def cli() -> None:
    """Train a packed model, each rank with its own pipeline stages.

    \b
    Example:
      runner launch ./Llama-3.2-1B-pp2 -- --steps 100 --seq-len 512 --global-batch 16 --data text/
    """


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL: verbs, flags, choices and paths.

    \b
    Examples:
      eval "$(runner completion bash)"               in ~/.bashrc; zsh in ~/.zshrc
      runner completion fish | source                in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None, shell
    click.echo(made(cli, {}, "runner", "_RUNNER_COMPLETE").source())


def run(begin: Callable[[], None] = lambda: None) -> None:
    """Run the command; end with its exit code. `begin` is called where an interrupt can be handled."""
    main = partial(cli.main, prog_name="runner", standalone_mode=False)
    run_cli(main, begin, refusal=click.ClickException, abort=click.exceptions.Abort)
