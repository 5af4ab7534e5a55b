"""The reshard command: the group of its verbs. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click

from manifests.command.console import LazyGroup, run_cli

_PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
# Where each verb is, and its line in the list of verbs; the help of the verb itself says more.
_VERBS = {
    "check": ("reshard.cli.read:check", "Check that any checkpoint is complete and consistent."),
    "commit": ("reshard.cli.pack:commit", "Merge the parts that reshard pack --part has written."),
    "completion": ("reshard.cli.command:completion", "Print the shell completion script of bash, zsh or fish."),
    "delta": ("reshard.cli.delta:delta", "Publish weights as a chain of deltas, and apply it."),
    "diff": ("reshard.cli.read:diff", "List what differs between two checkpoints."),
    "export": ("reshard.cli.pack:export", "Write a Hugging Face folder, or another trainer's format."),
    "inspect": ("reshard.cli.read:inspect", "Show what a checkpoint contains, from headers alone."),
    "layout": ("reshard.cli.plan:layout", "Show what a layout means, without a model."),
    "merge": ("reshard.cli.merge:merge", "Add LoRA adapters to a model's weights."),
    "pack": ("reshard.cli.pack:pack", "Write a checkpoint as one bundle per pipeline stage."),
    "plan": ("reshard.cli.plan:plan", "Show a layout's stages, memory, balance and pipeline bubble."),
    "push": ("reshard.cli.read:push", "Upload a packed model to the Hugging Face hub."),
    "sign": ("reshard.cli.read:sign", "Sign a manifest with a private key."),
    "verify": ("reshard.cli.read:verify", "Compare every byte with the manifest's digests."),
}


class _Group(LazyGroup, click.Group): ...


@click.group(cls=_Group, verbs=_VERBS, context_settings=_PLAIN)
@click.version_option(package_name="reshard", prog_name="reshard")
def cli() -> None:
    """Pack a Hugging Face checkpoint into pipeline stages, reshard it, and export it again.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2
    """


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL: verbs, flags, choices and paths.

    \b
    Examples:
      eval "$(reshard completion bash)"              in ~/.bashrc; zsh in ~/.zshrc
      reshard completion fish | source               in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    assert completer is not None, shell
    click.echo(completer(ctx.find_root().command, {}, "reshard", "_RESHARD_COMPLETE").source())


def run(begin: Callable[[], None] = lambda: None) -> None:
    """Run the command; end with its exit code. `begin` is called where an interrupt can be handled."""
    main = partial(cli.main, prog_name="reshard", standalone_mode=False)
    run_cli(main, begin, refusal=click.ClickException, abort=click.exceptions.Abort)
