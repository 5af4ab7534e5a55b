"""verify, inspect and diff: the commands that only read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from reshard.cli import options
from reshard.cli.verb import Verb


@click.command(cls=Verb)
@options.manifest
@click.option("--quick", is_flag=True, help="Read no tensors; compare only sizes and headers.")
@click.option(
    "--against",
    type=click.Path(),
    metavar="SOURCE",
    help="Also compare with every tensor and auxiliary file of SOURCE; none may be missing.",
)
@click.option("--stage", "stages", type=options.WholeNumber(0), multiple=True, metavar="N",
              help="Verify only this stage; may be repeated.")  # fmt: skip
@click.option("--public-key", type=click.Path(), metavar="FILE",
              help="First verify the manifest's signature with this public key (PEM).")  # fmt: skip
@options.as_json
@options.quiet
def verify(
    manifest: str, quick: bool, against: str | None, stages: tuple[int, ...], public_key: str | None,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Read every byte that MANIFEST names, and compare digests. Exits with code 4 if something differs.

    Virtual bundles have no digests: file sizes, headers and modification times are compared, and bytes with --against.

    \b
    Example:
      reshard verify ./Llama-3.2-1B-pp2 --against ./Llama-3.2-1B
    """
    from reshard.api.verify import verify as run
    from reshard.report.done import verify_json, verify_text

    with options.progress("verify", quiet, is_report=True) as progress:
        done = run(
            manifest, quick=quick, against=against, stages=stages or None, public_key=public_key, progress=progress,
        )  # fmt: skip
    if as_json or not (quiet and done.equal):
        click.echo(json.dumps(verify_json(done)) if as_json else verify_text(done, manifest))
    if not done.equal:
        sys.exit(4)


@click.command(cls=Verb)
@options.manifest
@click.option("--tensors", is_flag=True, help="List every tensor with its stage, dtype, shape and digest.")
@options.as_json
@options.quiet
def inspect(manifest: str, tensors: bool, as_json: bool, quiet: bool) -> None:
    """Show what a manifest, pytorch_model*.bin files or a folder of DCP or DeepSpeed contain, from headers alone.

    \b
    Example:
      reshard inspect ./Llama-3.2-1B-pp2 --tensors
    """
    from reshard.api.inspect import inspect as run
    from reshard.formats.table import Listing
    from reshard.report.inspect import inspect_json, inspect_text
    from reshard.report.inspect_archives import listing_json, listing_text

    contents = run(manifest)
    if isinstance(contents, Listing):
        click.echo(json.dumps(listing_json(contents, tensors)) if as_json else listing_text(contents, tensors))
        return
    for piece in (inspect_json if as_json else inspect_text)(contents.manifest, contents.bundles, tensors):
        click.echo(piece, nl=False)


@click.command(cls=Verb)
@click.argument("a", type=click.Path(), metavar="A")
@click.argument("b", type=click.Path(), metavar="B")
@options.model
@click.option(
    "--norms/--no-norms", "with_norms", default=True, help="Read the tensors that differ, and print the norm of B - A."
)
@click.option("--bytes", "reads_bytes", is_flag=True, help="Read and hash every tensor instead of trusting digests.")
@options.as_json
@options.quiet
def diff(
    a: str, b: str, model: Path | None, with_norms: bool, reads_bytes: bool, as_json: bool, quiet: bool
) -> None:  # fmt: skip
    """List the weights and optimizer state that differ between A and B. Exits with code 4 if some do.

    A and B are manifests or Hugging Face folders, of any layouts. Manifests have digests: comparing two of them reads
    only headers and, for the norms, the tensors that differ. --bytes reads all tensors and verifies their digests.

    \b
    Example:
      reshard diff ./checkpoints/step-000100 ./checkpoints/step-000200
    """
    from reshard.api.diff import diff as run
    from reshard.report.done import diff_json, diff_text

    with options.progress("diff", quiet, is_report=True) as progress:
        done = run(a, b, model=model, with_norms=with_norms, reads_bytes=reads_bytes, progress=progress)
    click.echo(json.dumps(diff_json(done)) if as_json else diff_text(done))
    if not done.equal:
        sys.exit(4)
