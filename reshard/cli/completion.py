"""reshard completion, by click's own scripts."""

from __future__ import annotations

import click

from reshard.cli.verb import Verb


@click.command(cls=Verb)
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
