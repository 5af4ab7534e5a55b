"""delta: publish weights as versions of a chain, and keep folders at one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from manifests.command.console import table
from manifests.command.sizes import show_bytes
from reshard.cli import options
from reshard.formatting import counted

if TYPE_CHECKING:
    from reshard.delta.apply import ApplyResult
    from reshard.delta.chains import ChainEntry, PruneResult, VerifyChainResult
    from reshard.delta.publish import PublishResult

_chain = click.argument("chain", type=click.Path(), metavar="CHAIN")
_version = click.option("--version", type=options.WholeNumber(0), metavar="N", show_default="the newest",
                        help="Version of the chain.")  # fmt: skip
_SHOWN_DIGITS = len("blake3:") + 12


@click.group()
def delta() -> None:
    """Publish weights as a chain of versions, of which each stores what changed since the one before.

    A chain is a folder or a prefix of a bucket: CHAIN/weight_v000001 is a Hugging Face folder, CHAIN/weight_v000002 and
    so on are deltas, in the format of slime and of SGLang's pull of weights. CHAIN@N is a SOURCE of pack, export,
    inspect, check and diff. Requires reshard[delta].

    \b
    Example:
      reshard delta publish ./checkpoints/step-000100 --chain ./chain
      reshard delta apply ./chain --to ./served
    """


@delta.command(cls=options.Verb, short_help="Publish weights as the next version.")
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

    with options.progress("publish", quiet) as progress:
        done = publish_delta(**arguments, progress=progress)
    options.print_result(quiet, as_json, lambda: _as_json(done), lambda: _publish_text(done))


@delta.command(cls=options.Verb, short_help="Bring a folder to a version.")
@_chain
@click.option("--to", type=click.Path(), required=True, metavar="DIR",
              help="Empty folder, or one with a version of the chain or the model that it begins with.")  # fmt: skip
@_version
@click.option("--quick", is_flag=True, help="Verify only the tensors that change.")
@options.parallelism_flags
@options.as_json
@options.quiet
def apply(as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Bring the folder DIR to a version of CHAIN, whole and verified.

    One pass writes the shards that change, whatever the number of versions between. Killed at any moment, it leaves
    the old weights, the new ones or none that open; the next apply finishes.

    \b
    Example:
      reshard delta apply s3://bucket/chain --to ./served
    """
    from reshard.delta.apply import apply_delta

    with options.progress("apply", quiet) as progress:
        done = apply_delta(**arguments, progress=progress)
    is_silent = quiet and not done.other_files
    options.print_result(is_silent, as_json, lambda: _as_json(done), lambda: apply_text(done))


@delta.command(cls=options.Verb, short_help="List versions.")
@_chain
@options.as_json
def log(chain: str, as_json: bool) -> None:
    """List the versions of CHAIN, with their sizes and the digests of their states.

    \b
    Example:
      reshard delta log ./chain
    """
    from reshard.delta.chains import delta_log

    entries = delta_log(chain)
    options.print_result(
        False, as_json, lambda: {"version": 1, "versions": list(map(asdict, entries))}, lambda: _log_text(entries)
    )


@delta.command(cls=options.Verb, short_help="Write a version as a full one.")
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

    with options.progress("fold", quiet) as progress:
        done = fold_delta(**arguments, progress=progress)
    options.print_result(quiet, as_json, lambda: _as_json(done), lambda: _publish_text(done))


@delta.command(cls=options.Verb, short_help="Remove old versions.")
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

    done = prune_delta(chain, keep=keep)
    options.print_result(quiet, as_json, lambda: _as_json(done), lambda: _prune_text(done))


@delta.command(cls=options.Verb, short_help="Compare all bytes with digests.")
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

    with options.progress("verify", quiet, is_report=True) as progress:
        done = verify_delta(**arguments, progress=progress)
    options.print_report(done.ok, quiet, as_json, lambda: _as_json(done), lambda: _verify_text(done))


def _as_json(done: PublishResult | ApplyResult | PruneResult | VerifyChainResult) -> dict[str, Any]:
    return {"version": 1, **asdict(done)}


def _publish_text(done: PublishResult) -> str:
    if not done.is_new:
        return f"nothing has changed since version {done.number}: {done.location}"
    if done.is_full:
        return f"published version {done.number}, full, {show_bytes(done.nbytes)}: {done.location}"
    changed = f"{done.num_changed} of {counted(done.num_tensors, 'tensor')} changed"
    how = f"{show_bytes(done.changed_nbytes)} of their bytes differ, stored as a delta of {show_bytes(done.nbytes)}"
    return f"published version {done.number}, {changed}: {how}, its headers included: {done.location}"


def apply_text(done: ApplyResult) -> str:
    unknown = "" if done.is_recorded else "; the chain has checksums of changed tensors, and no digest of the rest"
    others = f"; not the version's, and not in the chain: {', '.join(done.other_files)}" if done.other_files else ""
    if done.before == done.number and not done.num_changed:
        how = "whose interrupted switch is finished now" if done.is_resumed else "as before"
        return f"version {done.number}, {how}{others}: {done.location}"
    since = "" if done.before is None else f", from version {done.before}"
    since += ", whose interrupted switch was finished first" if done.is_resumed else ""
    changed = f"{done.num_changed} of {counted(done.num_tensors, 'tensor')} changed"
    written = f"{show_bytes(done.write_nbytes)} written, {show_bytes(done.read_nbytes)} read"
    return f"version {done.number}{since}: {changed}, {written}{unknown}{others}: {done.location}"


def _log_text(entries: Sequence[ChainEntry]) -> str:
    if not entries:
        return "no versions"
    rows = [
        (
            str(entry.number),
            "full" if entry.base is None else f"since {entry.base}",
            str(entry.num_tensors),
            show_bytes(entry.nbytes),
            (entry.state or "not recorded")[:_SHOWN_DIGITS],
        )
        for entry in entries
    ]
    return table(("version", "kind", "tensors", "size", "state"), rows)


def _prune_text(done: PruneResult) -> str:
    removed = counted(len(done.removed), "version")
    return f"removed {removed}; the oldest is {done.oldest}"


def _verify_text(done: VerifyChainResult) -> str:
    versions, tensors = counted(done.num_versions, "version"), counted(done.num_tensors, "tensor")
    read = f"{versions}, {tensors}, {show_bytes(done.nbytes)} read"
    lines = [f"{finding.where}: {finding.problem}" for finding in done.findings]
    return "\n".join([*lines, f"{counted(len(lines), 'difference')}; {read}" if lines else f"verified: {read}"])
