"""check: the verb for checkpoints that anybody wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

from reshard.cli import options
from reshard.cli.verb import Verb


@click.command(cls=Verb)
@click.argument("checkpoint", type=click.Path(), metavar="CHECKPOINT")
@click.option("--values", is_flag=True, help="Read all floating-point tensors: NaN, infinity, matrices of zeros.")
@click.option("--against", type=click.Path(), metavar="OTHER", help="Compare names, shapes and dtypes with OTHER.")
@click.option("--bytes", "reads_bytes", is_flag=True, help="With --against: read and compare every byte.")
@options.model
@click.option(
    "--digests",
    type=click.Choice(["write", "verify"]),
    help="Write digests.json into the folder if no problem was found, or read every file and compare with it.",
)
@options.as_json
@options.quiet
def check(
    checkpoint: str,
    values: bool,
    against: str | None,
    model: Path | None,
    reads_bytes: bool,
    digests: Literal["write", "verify"] | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check that CHECKPOINT is complete and consistent, whoever wrote it. Exit code 4: problems were found.

    CHECKPOINT is a Hugging Face folder, a hub repository, a bucket, a packed folder, or a folder of
    torch.distributed.checkpoint. The index is compared with the files, the headers with the data, config.json with the
    tensors, the tokenizer with the embedding.

    \b
    Example:
      reshard check ./Llama-3.2-1B --values
    """
    from reshard.api.check import check as run
    from reshard.report.done import check_json, check_text

    with options.progress("check", quiet, is_report=True) as progress:
        done = run(
            checkpoint,
            against=against,
            model=model,
            reads_bytes=reads_bytes,
            values=values,
            digests=digests,
            progress=progress,
        )
    if as_json or not (quiet and done.ok):
        click.echo(json.dumps(check_json(done)) if as_json else check_text(done))
    if not done.ok:
        sys.exit(4)
