"""verify, check, inspect and diff, which only read, and sign and push, for whoever publishes a packed model."""

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

    CHECKPOINT is a Hugging Face or packed folder, a hub repository, a bucket, CHAIN@N, or a checkpoint of
    torch.distributed.checkpoint, DeepSpeed or Megatron-Core. The index is compared with the files, the headers with the
    data, config.json with the tensors, the tokenizer with the embedding.

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
    """Show what a packed folder, a DCP or DeepSpeed checkpoint, or pytorch_model*.bin files contain, from headers
    alone.

    \b
    Example:
      reshard inspect ./Llama-3.2-1B-pp2 --tensors
    """
    from reshard.formats.inspect import inspect as run
    from reshard.formats.table import Listing
    from reshard.report.done import inspect_json, inspect_text, listing_json, listing_text

    contents = run(manifest)
    if isinstance(contents, Listing):
        click.echo(json.dumps(listing_json(contents, tensors)) if as_json else listing_text(contents, tensors))
        return
    contained = contents.manifest, contents.bundles, tensors
    click.echo(json.dumps(inspect_json(*contained)) if as_json else inspect_text(*contained))


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


@click.command(cls=options.Verb)
@options.manifest
@click.option("--key", type=click.Path(), required=True, metavar="FILE",
              help="Private key to sign with (PEM; P-256, P-384 or P-521).")  # fmt: skip
@click.option("--ask-password", "password", is_flag=True, help="Ask for the password of an encrypted key.")
@options.force_file
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
@click.argument("folder", type=click.Path(), metavar="DIR")
@click.argument("repository", metavar="ORG/NAME")
@click.option("--revision", metavar="BRANCH", show_default="main", help="Branch to commit to; created from main.")
@click.option("--public", is_flag=True, help="Create a public repository, or publish in one that is public.")
@click.option("--message", metavar="TEXT", show_default="architecture, stages and step", help="Message of the commit.")
@click.option("--force", is_flag=True, help="Replace another model; its files are removed in the same commit.")
@options.as_json
@options.quiet
def push(folder: str, as_json: bool, quiet: bool, **arguments: Any) -> None:
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
