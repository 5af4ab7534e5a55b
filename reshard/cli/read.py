"""verify, check, inspect and diff: the commands that only read."""

from __future__ import annotations

import json
from typing import Any

import click

from reshard.cli import options


@click.command(cls=options.Verb)
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
def verify(manifest: str, stages: tuple[int, ...], as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Read every byte that MANIFEST names, and compare digests. Exits with code 4 if something differs.

    Virtual bundles have no digests: file sizes, headers and modification times are compared, and bytes with --against.

    \b
    Example:
      reshard verify ./Llama-3.2-1B-pp2 --against ./Llama-3.2-1B
    """
    from reshard.checks.verify import verify as run
    from reshard.report.done import verify_json, verify_text

    with options.progress("verify", quiet, is_report=True) as progress:
        done = run(manifest, stages=stages or None, **arguments, progress=progress)
    options.print_report(done.equal, quiet, as_json, lambda: verify_json(done), lambda: verify_text(done, manifest))


@click.command(cls=options.Verb)
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
def check(as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Check that CHECKPOINT is complete and consistent, whoever wrote it. Exit code 4: problems were found.

    CHECKPOINT is a Hugging Face folder, a hub repository, a bucket, a packed folder, or a folder of
    torch.distributed.checkpoint. The index is compared with the files, the headers with the data, config.json with the
    tensors, the tokenizer with the embedding.

    \b
    Example:
      reshard check ./Llama-3.2-1B --values
    """
    from reshard.checks.check import check as run
    from reshard.report.done import check_json, check_text

    with options.progress("check", quiet, is_report=True) as progress:
        done = run(**arguments, progress=progress)
    options.print_report(done.ok, quiet, as_json, lambda: check_json(done), lambda: check_text(done))


@click.command(cls=options.Verb)
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
    from reshard.formats.inspect import inspect as run
    from reshard.formats.table import Listing
    from reshard.report.inspect import inspect_json, inspect_text, listing_json, listing_text

    contents = run(manifest)
    if isinstance(contents, Listing):
        click.echo(json.dumps(listing_json(contents, tensors)) if as_json else listing_text(contents, tensors))
        return
    for piece in (inspect_json if as_json else inspect_text)(contents.manifest, contents.bundles, tensors):
        click.echo(piece, nl=False)


@click.command(cls=options.Verb)
@click.argument("a", type=click.Path(), metavar="A")
@click.argument("b", type=click.Path(), metavar="B")
@options.model
@click.option(
    "--norms/--no-norms", "with_norms", default=True, help="Read the tensors that differ, and print the norm of B - A."
)
@click.option("--tensors", is_flag=True, help="List every tensor that has another dtype, too.")
@click.option("--bytes", "reads_bytes", is_flag=True, help="Read and hash every tensor instead of trusting digests.")
@options.as_json
@options.quiet
def diff(tensors: bool, as_json: bool, quiet: bool, **arguments: Any) -> None:
    """List the weights and optimizer state that differ between A and B. Exits with code 4 if some do.

    A and B are manifests or Hugging Face folders, of any layouts. Manifests have digests: comparing two of them reads
    only headers and, for the norms, the tensors that differ. --bytes reads all tensors and verifies their digests.

    \b
    Example:
      reshard diff ./checkpoints/step-000100 ./checkpoints/step-000200
    """
    from reshard.checks.diff import diff as run
    from reshard.report.done import diff_json, diff_text

    with options.progress("diff", quiet, is_report=True) as progress:
        done = run(**arguments, progress=progress)
    options.print_report(done.equal, False, as_json, lambda: diff_json(done), lambda: diff_text(done, tensors))
