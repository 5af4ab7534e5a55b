"""verify, inspect and diff: the verbs that read and say what they found."""

from __future__ import annotations

import json
import sys

import click

from reshard.cli import options

__all__ = ["diff", "inspect", "verify"]


@click.command()
@options.manifest
@click.option("--quick", is_flag=True, help="Read no tensor: compare sizes and headers.")
@click.option(
    "--against",
    type=click.Path(),
    metavar="SOURCE",
    help="Compare with every tensor and auxiliary file of SOURCE, too; none may be missing.",
)
@click.option("--stage", "stages", type=options.Whole(0), multiple=True, metavar="N",
              help="Look at this stage alone; may be repeated.")  # fmt: skip
@options.allow_remote
@options.as_json
@options.quiet
def verify(
    manifest: str, quick: bool, against: str | None, stages: tuple[int, ...], as_json: bool, quiet: bool
) -> None:  # fmt: skip
    """Read every byte that MANIFEST names, and compare digests. Exit code 4 says that something differs.

    Virtual bundles have no digests: sizes, headers and times of change are compared, and bytes with --against.

    \b
    Example:
      reshard verify ./Llama-3.2-1B-pp2 --against ./Llama-3.2-1B
    """
    from reshard.api.verify import verify as run
    from reshard.report.done import verify_json, verify_text

    with options.progress("verify", quiet) as progress:
        done = run(manifest, quick=quick, against=against, stages=stages or None, progress=progress)
    if as_json or not (quiet and done.equal):
        click.echo(json.dumps(verify_json(done)) if as_json else verify_text(done, manifest))
    if not done.equal:
        sys.exit(4)


@click.command()
@options.manifest
@click.option("--tensors", is_flag=True, help="List every tensor with its stage, dtype, shape and digest.")
@options.allow_remote
@options.as_json
@options.quiet
def inspect(manifest: str, tensors: bool, as_json: bool, quiet: bool) -> None:
    """Say what a manifest holds, from headers alone.

    \b
    Example:
      reshard inspect ./Llama-3.2-1B-pp2 --tensors
    """
    from reshard.report.inspect import inspect_json, inspect_text

    click.echo(json.dumps(inspect_json(manifest, tensors)) if as_json else inspect_text(manifest, tensors))


@click.command()
@click.argument("a", type=click.Path(), metavar="A")
@click.argument("b", type=click.Path(), metavar="B")
@click.option("--norms/--no-norms", default=True, help="Read the tensors that differ, and give the norm of B - A.")
@click.option("--bytes", "reads_bytes", is_flag=True, help="Read and hash every tensor; trust no digest.")
@options.allow_remote
@options.as_json
@options.quiet
def diff(a: str, b: str, norms: bool, reads_bytes: bool, as_json: bool, quiet: bool) -> None:
    """Say which tensors of A and B differ, weights and moments, whatever the layouts. Exit code 4: some do.

    A and B are manifests or Hugging Face folders. Manifests carry digests: to compare two of them, headers are read,
    and for the norms the tensors that differ. With --bytes all tensors are read, and must have their digests.

    \b
    Example:
      reshard diff ./checkpoints/step-000100 ./checkpoints/step-000200
    """
    from reshard.api.diff import diff as run
    from reshard.report.diff import diff_json, diff_text

    with options.progress("diff", quiet) as progress:
        found = run(a, b, with_norms=norms, reads_bytes=reads_bytes, progress=progress)
    click.echo(json.dumps(diff_json(found)) if as_json else diff_text(found))
    if not found.equal:
        sys.exit(4)
