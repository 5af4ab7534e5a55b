"""Shell completion of reshard and runner, by click's own scripts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]


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
    group = ctx.find_root().command
    program = ctx.find_root().info_name or ""
    made = get_completion_class(shell)
    assert made is not None, shell
    click.echo(made(group, {}, program, f"_{program.upper()}_COMPLETE").source())
