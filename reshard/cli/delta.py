"""delta: publish weights as versions of a chain, and keep folders at one of them."""

from __future__ import annotations

from typing import Any

import click

from reshard.cli import options

_chain = click.argument("chain", type=click.Path(), metavar="CHAIN")
_version = click.option("--version", type=options.WholeNumber(0), metavar="N", show_default="the newest",
                        help="Version of the chain.")  # fmt: skip


@click.group()
def delta() -> None:
    """Publish weights as a chain of versions, of which each stores what changed since the one before.

    A chain is a folder or a prefix of a bucket: CHAIN/weight_v000001 is a Hugging Face folder, CHAIN/weight_v000002 and
    so on are deltas, in the format of slime and of SGLang's pull of weights. CHAIN@N is a SOURCE of pack, export, check
    and diff. Requires reshard[delta].

    \b
    Example:
      reshard delta publish ./checkpoints/step-000100 --chain ./chain
      reshard delta apply ./chain --to ./served
    """


@delta.command(cls=options.Verb)
@click.argument("source", type=click.Path(), metavar="NEW")
@click.option("--chain", type=click.Path(), required=True, metavar="DIR|URL",
              callback=lambda _, __, text: options.address(text, "--chain"),
              help="Folder of the chain, or s3://BUCKET/PREFIX (gs://, az://).")  # fmt: skip
@click.option("--base", type=click.Path(), metavar="SOURCE",
              help="Copy of the newest version, to compare with; of a new chain, what its receivers have.")  # fmt: skip
@click.option("--dtype", type=click.Choice(options.DTYPES), default="source", help="Cast weights to this dtype.")
@click.option("--full", is_flag=True, help="Publish a full version even if a delta is possible.")
@options.parallelism_flags
@options.as_json
@options.quiet
def publish(as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Publish the weights of NEW as the next version of a chain.

    NEW is anything that pack takes. The first version is a full one, and so is one with other tensors than the version
    before. Nothing is published if nothing has changed.

    \b
    Example:
      reshard delta publish ./checkpoints/step-000100 --chain ./chain --dtype bf16
    """
    from reshard.delta.publish import publish_delta
    from reshard.report.delta import as_json as to_json
    from reshard.report.delta import publish_text

    with options.progress("publish", quiet) as progress:
        done = publish_delta(**arguments, progress=progress)
    options.print_result(quiet, as_json, lambda: to_json(done), lambda: publish_text(done))


@delta.command(cls=options.Verb)
@_chain
@click.option("--to", type=click.Path(), required=True, metavar="DIR",
              help="Folder of weights, in any version of the chain, or an empty one.")  # fmt: skip
@_version
@click.option("--quick", is_flag=True, help="Verify only the tensors that change.")
@options.parallelism_flags
@options.as_json
@options.quiet
def apply(as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Bring the folder DIR to a version of CHAIN, whole and verified.

    One pass writes the shards that change, whatever the number of versions between. Killed at any moment, it leaves
    the old weights, the new ones or no index; the next apply finishes.

    \b
    Example:
      reshard delta apply s3://bucket/chain --to ./served
    """
    from reshard.delta.apply import apply_delta
    from reshard.report.delta import apply_text
    from reshard.report.delta import as_json as to_json

    with options.progress("apply", quiet) as progress:
        done = apply_delta(**arguments, progress=progress)
    options.print_result(quiet, as_json, lambda: to_json(done), lambda: apply_text(done))


@delta.command(cls=options.Verb)
@_chain
@options.as_json
def log(chain: str, as_json: bool) -> None:
    """List the versions of CHAIN, with their sizes and the digests of their states.

    \b
    Example:
      reshard delta log ./chain
    """
    from reshard.delta.chains import delta_log
    from reshard.report.delta import log_json, log_text

    entries = delta_log(chain)
    options.print_result(False, as_json, lambda: log_json(entries), lambda: log_text(entries))


@delta.command(cls=options.Verb)
@_chain
@_version
@click.option("--out", type=click.Path(), metavar="DIR|URL", help="Another chain, which begins with this version.",
              callback=lambda _, __, text: None if text is None else options.address(text))  # fmt: skip
@options.parallelism_flags
@options.as_json
@options.quiet
def fold(as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Write a version of CHAIN as a full one: as its next version, which rolls back to N, or as the first of another.

    \b
    Examples:
      reshard delta fold ./chain                              prune can then remove all versions before
      reshard delta fold ./chain --version 7 --out ./fork     another chain, from version 7 on
    """
    from reshard.delta.publish import fold_delta
    from reshard.report.delta import as_json as to_json
    from reshard.report.delta import publish_text

    with options.progress("fold", quiet) as progress:
        done = fold_delta(**arguments, progress=progress)
    options.print_result(quiet, as_json, lambda: to_json(done), lambda: publish_text(done))


@delta.command(cls=options.Verb)
@_chain
@click.option("--keep", type=options.WholeNumber(1), required=True, metavar="N", help="Number of versions to keep.")
@options.as_json
@options.quiet
def prune(chain: str, keep: int, as_json: bool, quiet: bool) -> None:
    """Remove versions of CHAIN that the last N do not need: those before a full version.

    \b
    Example:
      reshard delta prune ./chain --keep 50
    """
    from reshard.delta.chains import prune_delta
    from reshard.report.delta import as_json as to_json
    from reshard.report.delta import prune_text

    done = prune_delta(chain, keep=keep)
    options.print_result(quiet, as_json, lambda: to_json(done), lambda: prune_text(done))


@delta.command(cls=options.Verb)
@_chain
@click.option("--base", type=click.Path(), metavar="SOURCE",
              help="What the first version is a delta of, if the chain has no full version before it.")  # fmt: skip
@options.as_json
@options.quiet
def verify(as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Read every byte of CHAIN, and compare digests and checksums of all versions. Exit code 4: something differs.

    \b
    Example:
      reshard delta verify ./chain
    """
    from reshard.delta.chains import verify_delta
    from reshard.report.delta import as_json as to_json
    from reshard.report.delta import verify_text

    with options.progress("verify", quiet, is_report=True) as progress:
        done = verify_delta(**arguments, progress=progress)
    options.print_report(done.ok, quiet, as_json, lambda: to_json(done), lambda: verify_text(done))


# Each verb's line in the list of verbs.
for _verb, _short_help in {
    publish: "Publish weights as the next version.",
    apply: "Bring a folder to a version.",
    log: "List versions.",
    fold: "Write a version as a full one.",
    prune: "Remove old versions.",
    verify: "Compare all bytes with digests.",
}.items():
    _verb.short_help = _short_help
