"""sign: the verb that vouches for a checkpoint."""

from __future__ import annotations

import json

import click

from reshard.cli import options
from reshard.cli.verb import Verb


@click.command(cls=Verb)
@options.manifest
@click.option("--key", type=click.Path(), required=True, metavar="FILE",
              help="Private key to sign with (PEM; P-256, P-384 or P-521).")  # fmt: skip
@click.option("--ask-password", "password", is_flag=True, help="Ask for the password of an encrypted key.")
@options.force
@options.as_json
@options.quiet
def sign(manifest: str, key: str, password: bool, force: bool, as_json: bool, quiet: bool) -> None:
    """Sign MANIFEST, which has digests of all bytes of its checkpoint; reshard verify --public-key verifies both.

    The signature is a Sigstore bundle of model-signing, made with a key and without a network. Shards are not read: run
    reshard verify first. Needs pip install 'reshard[sign]'.

    \b
    Example:
      openssl ecparam -name prime256v1 -genkey -noout -out key.pem && openssl ec -in key.pem -pubout -out key.pub
      reshard sign ./Llama-3.2-1B-pp2 --key key.pem
      reshard verify ./Llama-3.2-1B-pp2 --public-key key.pub
    """
    from reshard.api.sign import sign as run

    secret = click.prompt("password of the key", hide_input=True, err=True) if password else None
    written = run(manifest, key=key, password=secret, force=force)
    if as_json:
        click.echo(json.dumps({"version": 1, "signature": str(written)}))
    elif not quiet:
        click.echo(f"signed {manifest}: {written}")
