"""Flags that several verbs share, and the frozen objects they become."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from manifests.errors import UsageError
from manifests.paths import is_unicode
from stores.address import is_url

if TYPE_CHECKING:
    from reshard.casting import Dtype
    from reshard.conversion import Plain

__all__ = [
    "DTYPES",
    "POLICIES",
    "SCHEDULES",
    "SPELLINGS",
    "as_json",
    "as_spelling",
    "conversion_flags",
    "cost",
    "drop",
    "force",
    "io",
    "layout_flags",
    "manifest",
    "out",
    "progress",
    "quiet",
    "ranks",
    "strict_megatron",
    "sync",
    "training_flags",
]

Command = Callable[..., Any]

# Choices, said again here: --help imports nothing that a verb needs. A test compares them.
SPELLINGS = ("megatron", "torchtitan", "toml", "deepspeed")
DTYPES = ("source", "fp32", "bf16", "fp16")
POLICIES = ("fp32", "bf16", "mixed")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
quiet = click.option("--quiet", is_flag=True, help="Show no progress.")
force = click.option("--force", is_flag=True, help="Replace an output that exists, in one step.")
out = click.option(
    "--out", required=True, metavar="DIR|URL", callback=lambda _, __, text: _address(text),
    help="Folder to write, or s3://BUCKET/PREFIX (gs://, az://, or what fsspec writes); it must not exist.",
)  # fmt: skip
drop = click.option("--drop", multiple=True, metavar="FQN", help="Leave this tensor behind; may be repeated.")
manifest = click.argument("manifest")
io = click.option(
    "--io",
    type=click.Choice(["direct", "buffered"]),
    default="direct",
    help="Write past the page cache, where the file system can, or through it.",
)
sync = click.option(
    "--sync/--no-sync", default=True, help="Wait until the disk has everything, or leave that to the kernel."
)
layout = click.option(
    "--layout", "spec", metavar="SPEC", show_default="of a manifest, the one that it has",
    help="pp=N[,vpp=K], a Megatron string, balance:COST,pp=N, uniform,pp=N, cut=MODULE, or a .toml or .json file of "
    "module lists.",
)  # fmt: skip
ranks = click.option(
    "--pp", "num_ranks", type=click.IntRange(min=1), metavar="P",
    help="Pipeline ranks, for a SPEC that does not say (a Megatron string).",
)  # fmt: skip
strict_megatron = click.option("--strict-megatron", is_flag=True, help="Refuse a Megatron string that Megatron would.")
as_spelling = click.option(
    "--as",
    "spelling",
    type=click.Choice(SPELLINGS),
    help="Print only the layout, in this spelling.",
)
cost = click.option(
    "--cost", type=click.Path(path_type=Path), metavar="FILE",
    help="Measured seconds of each module (JSON), to take in place of FLOPs.",
)  # fmt: skip
_CONVERSION = (
    click.option(
        "--dtype", type=click.Choice(DTYPES[1:]), help="Cast weights to this dtype.",
        show_default="as they are",
    ),
    click.option(
        "--dequantise", type=click.Choice(["bf16", "fp32"]), show_default="as they are",
        help="Turn quantised weights (fp8 in blocks, mxfp4) into plain ones of this dtype.",
    ),
    click.option("--merge-slices", is_flag=True, help="Make tensors whole that several ranks wrote in slices."),
)  # fmt: skip
_TRAINING = (
    click.option(
        "--schedule", metavar="NAME", show_default="the layout's, or one that runs its stages",
        help=f"Assume this schedule: {', '.join(SCHEDULES)}.",
    ),
    click.option(
        "--microbatches", type=click.IntRange(min=1), metavar="M", show_default="4 for each rank",
        help="Assume so many microbatches in a step.",
    ),
    click.option("--microbatch", type=click.IntRange(min=1), default=1, metavar="B", help="Sequences in one of them."),
    click.option("--seq-len", type=click.IntRange(min=1), default=4096, metavar="L", help="Tokens in a sequence."),
    click.option(
        "--dtype-policy", type=click.Choice(POLICIES), default="fp32",
        help="Dtypes to estimate memory for; mixed is bf16 weights, fp32 gradients, master weights and moments.",
    ),
    click.option(
        "--memory-limit", metavar="BYTES",
        help="What a rank may hold (80GB, 75GiB); a layout that is solved for keeps to it.",
    ),
    cost,
)  # fmt: skip


def layout_flags(command: Command) -> Command:
    """Add the flags that ask for a layout; the command gets them as `asked`, a LayoutRequest."""

    @functools.wraps(command)
    def gathered(*, spec: str | None, num_ranks: int | None, strict_megatron: bool, **others: Any) -> Any:
        from reshard.planning import LayoutRequest
        from reshard.source import names_manifest

        if spec is None and not names_manifest(others["source"]):
            raise click.UsageError("Missing option '--layout'.", click.get_current_context())
        return command(asked=LayoutRequest(spec=spec, num_ranks=num_ranks, strict_megatron=strict_megatron), **others)

    return _with_flags(gathered, (layout, ranks, strict_megatron))


def conversion_flags(command: Command) -> Command:
    """Add the flags that change tensors on their way; the command gets them as `conversion`, a Conversion."""

    @functools.wraps(command)
    def gathered(*, dtype: Dtype | None, dequantise: Plain | None, merge_slices: bool, **others: Any) -> Any:
        from reshard.conversion import Conversion

        conversion = Conversion(dtype=dtype, dequantise=dequantise, merge_slices=merge_slices)
        return command(conversion=conversion, **others)

    return _with_flags(gathered, _CONVERSION)


def training_flags(command: Command) -> Command:
    """Add the flags that say what is assumed of training; the command gets them as `assumed`, Assumptions."""

    @functools.wraps(command)
    def gathered(
        *, schedule: str | None, microbatches: int | None, microbatch: int, seq_len: int, dtype_policy: str,
        memory_limit: str | None, cost: Path | None, **others: Any,
    ) -> Any:  # fmt: skip
        from reshard.costs import read_times
        from reshard.forecast import Assumptions

        assumed = Assumptions(
            schedule=schedule,
            num_microbatches=microbatches,
            microbatch=microbatch,
            seq_len=seq_len,
            policy=dtype_policy,
            memory_limit=_limit(memory_limit),
            measured=read_times(cost) if cost else None,
        )
        return command(assumed=assumed, **others)

    return _with_flags(gathered, _TRAINING)


@contextlib.contextmanager
def progress(verb: str, nbytes: int, quiet: bool) -> Iterator[Callable[[int], object]]:
    """Show a bar on a terminal; the block reports bytes to what it is given."""
    if quiet or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from tqdm import tqdm

    with tqdm(total=nbytes, desc=verb, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update


def _address(text: str) -> str | Path:
    if not is_unicode(text):
        raise UsageError("--out", f"{text!r} is not valid UTF-8", "choose another name")
    return text if is_url(text) else Path(text)


def _with_flags(command: Command, flags: Sequence[Callable[[Command], Command]]) -> Command:
    for flag in reversed(flags):
        command = flag(command)
    return command


def _limit(text: str | None) -> int | None:
    from reshard.units import parse_bytes

    limit = parse_bytes(text) if text is not None else None
    if text is not None and limit is None:
        raise UsageError("--memory-limit", f"expected a number of bytes, found {text[:80]!r}", "write 80GB or 75GiB")
    return limit
