"""push: the verb that uploads."""

from __future__ import annotations

from pathlib import Path

import click

from reshard.cli import options
from reshard.cli.verb import Verb


@click.command(cls=Verb)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("repository", metavar="ORG/NAME")
@click.option("--revision", metavar="BRANCH", show_default="main", help="Branch to commit to; created from main.")
@click.option("--public", is_flag=True, help="Create a public repository, or publish in one that is public.")
@click.option("--message", metavar="TEXT", show_default="architecture, stages and step", help="Message of the commit.")
@click.option("--force", is_flag=True, help="Replace another model; its files are removed in the same commit.")
@options.as_json
@options.quiet
def push(
    folder: Path, repository: str, revision: str | None, public: bool, message: str | None, force: bool,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Upload the packed model or checkpoint in DIR to the Hugging Face hub, in one commit.

    The repository is private unless --public. It has the whole checkpoint, with a model card, or nothing of it: after
    an interruption run the command again, and files that were sent are not sent again. Log in with hf auth login, or
    set HF_TOKEN.

    \b
    Example:
      reshard push ./Llama-3.2-1B-pp2 my-org/Llama-3.2-1B-pp2
    """
    from reshard.api.push import push as run
    from reshard.report.done import push_json, push_text
    from stores.hub.upload import showing_bars

    with showing_bars(not quiet):
        done = run(folder, repository, revision=revision, public=public, message=message, force=force)
    options.print_result(quiet, as_json, lambda: push_json(done), lambda: push_text(done, folder))
