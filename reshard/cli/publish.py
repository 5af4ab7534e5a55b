"""sign and push: the commands for whoever publishes a packed model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reshard.cli import options


@click.command(cls=options.Verb)
@options.manifest
@click.option("--key", type=click.Path(), required=True, metavar="FILE",
              help="Private key to sign with (PEM; P-256, P-384 or P-521).")  # fmt: skip
@click.option("--ask-password", "password", is_flag=True, help="Ask for the password of an encrypted key.")
@options.force
@options.as_json
@options.quiet
def sign(manifest: str, password: bool, as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Sign MANIFEST, which has digests of all bytes of its checkpoint; reshard verify --public-key verifies both.

    The signature is a Sigstore bundle of model-signing, made with a key and without a network. Shards are not read: run
    reshard verify first. Needs pip install 'reshard[sign]'.

    \b
    Example:
      openssl ecparam -name prime256v1 -genkey -noout -out key.pem && openssl ec -in key.pem -pubout -out key.pub
      reshard sign ./Llama-3.2-1B-pp2 --key key.pem
      reshard verify ./Llama-3.2-1B-pp2 --public-key key.pub
    """
    from reshard.checks.signature import sign as run

    secret = click.prompt("password of the key", hide_input=True, err=True) if password else None
    written = run(manifest, password=secret, **arguments)
    options.print_result(
        quiet, as_json, lambda: {"version": 1, "signature": str(written)}, lambda: f"signed {manifest}: {written}"
    )


@click.command(cls=options.Verb)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("repository", metavar="ORG/NAME")
@click.option("--revision", metavar="BRANCH", show_default="main", help="Branch to commit to; created from main.")
@click.option("--public", is_flag=True, help="Create a public repository, or publish in one that is public.")
@click.option("--message", metavar="TEXT", show_default="architecture, stages and step", help="Message of the commit.")
@click.option("--force", is_flag=True, help="Replace another model; its files are removed in the same commit.")
@options.as_json
@options.quiet
def push(folder: Path, as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Upload the packed model or checkpoint in DIR to the Hugging Face hub, in one commit.

    The repository is private unless --public. It has the whole checkpoint, with a model card, or nothing of it: after
    an interruption run the command again, and files that were sent are not sent again. Log in with hf auth login, or
    set HF_TOKEN.

    \b
    Example:
      reshard push ./Llama-3.2-1B-pp2 my-org/Llama-3.2-1B-pp2
    """
    from reshard.packing.push import push as run
    from reshard.report.done import push_json, push_text
    from stores.hub.upload import showing_bars

    with showing_bars(not quiet):
        done = run(folder, **arguments)
    options.print_result(quiet, as_json, lambda: push_json(done), lambda: push_text(done, folder))
