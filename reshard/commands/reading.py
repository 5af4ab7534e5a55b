"""verify, inspect and diff: the verbs that read and say what they found."""

from __future__ import annotations

import json
import sys

import click

from manifests.errors import UsageError
from reshard.commands import options

__all__ = ["diff", "inspect", "verify"]


@click.command()
@options.manifest
@click.option("--quick", is_flag=True, help="Read no tensor: compare sizes and headers.")
@click.option("--against", metavar="SOURCE", help="Compare with every tensor of SOURCE, too; none may be missing.")
@click.option("--stage", "stages", type=click.IntRange(min=0), multiple=True, metavar="N",
              help="Look at this stage alone; may be repeated.")  # fmt: skip
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
    from reshard.report.done import verify_json, verify_text
    from reshard.source import open_source
    from reshard.verify import VerifyOptions, nbytes_to_read
    from reshard.verify import verify as run

    if quick and against:
        raise UsageError("--quick", "reads no tensor, --against reads all of them", "leave one of the two out")
    source = open_source(against) if against else None
    asked = VerifyOptions(quick=quick, against=source, stages=frozenset(stages) if stages else None)
    with options.progress("verify", nbytes_to_read(manifest, asked), quiet) as progress:
        done = run(manifest, asked, progress)
    click.echo(json.dumps(verify_json(done)) if as_json else verify_text(done, manifest))
    if done.differences:
        sys.exit(4)


@click.command()
@options.manifest
@click.option("--tensors", is_flag=True, help="List every tensor with its stage, dtype, shape and digest.")
@options.as_json
def inspect(manifest: str, tensors: bool, as_json: bool) -> None:
    """Say what a manifest holds, from headers alone.

    \b
    Example:
      reshard inspect ./Llama-3.2-1B-pp2 --tensors
    """
    from reshard.inspect import inspect_json, inspect_text

    click.echo(json.dumps(inspect_json(manifest, tensors)) if as_json else inspect_text(manifest, tensors))


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--norms/--no-norms", default=True, help="Read the tensors that differ, and give the norm of B - A.")
@options.as_json
@options.quiet
def diff(a: str, b: str, norms: bool, as_json: bool, quiet: bool) -> None:
    """Say which tensors of A and B differ, weights and moments, whatever the layouts. Exit code 4: some do.

    A and B are manifests or Hugging Face folders. Manifests carry digests: to compare two of them, headers are read,
    and for the norms the tensors that differ.

    \b
    Example:
      reshard diff ./checkpoints/step-000100 ./checkpoints/step-000200
    """
    from reshard.diff import diff as run
    from reshard.diff import nbytes_to_hash
    from reshard.report.diff import diff_json, diff_text
    from reshard.source import open_source

    left, right = open_source(a), open_source(b)
    with options.progress("diff", nbytes_to_hash(left, right), quiet) as progress:
        found = run(left, right, with_norms=norms, progress=progress)
    click.echo(json.dumps(diff_json(found)) if as_json else diff_text(found))
    if found.differences:
        sys.exit(4)
