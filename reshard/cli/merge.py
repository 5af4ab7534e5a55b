"""merge: the command that adds adapters to a model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from manifests.command.sizes import show_bytes
from reshard.cli import options

if TYPE_CHECKING:
    from stores.open import Address

_GROUPS = {
    "What and where": ("out", "weights", "force", "as_json", "quiet"),
    "Bytes": ("io", "sync", "num_threads"),
    "Remote": ("num_streams", "memory_nbytes"),
}


@click.command(cls=options.Verb, groups=_GROUPS)
@click.argument("base", type=click.Path(), metavar="BASE")
@click.argument("adapters", type=click.Path(), metavar="ADAPTER...", nargs=-1, required=True)
@options.out
@click.option(
    "--weight", "weights", type=float, multiple=True, metavar="W", show_default="1 for each",
    help="What an adapter is multiplied by: one for each, in order.",
)  # fmt: skip
@options.force
@options.writing_flags
@options.as_json
@options.quiet
def merge(
    base: str, adapters: tuple[str, ...], out: Address, as_json: bool, quiet: bool, **arguments: Any
) -> None:  # fmt: skip
    """Add LoRA adapters to a model's weights, and write a Hugging Face folder.

    BASE is anything without optimizer state that reshard pack reads: a Hugging Face folder or hub repository, a
    manifest, another trainer's checkpoint. ADAPTER is a PEFT folder, of runner launch --save or of peft. A merged value
    is computed in float64 and rounded once to the weight's dtype; weights in float8 blocks and MXFP4 are quantized as
    they were. Tensors that no adapter touches keep their bytes. Tensors are merged in blocks, so memory does not grow
    with the model. reshard pack BASE --adapter ADAPTER writes bundles instead.

    \b
    Example:
      reshard merge ./Llama-3.2-1B ./adapter --out ./Llama-3.2-1B-merged
    """
    from reshard.formatting import counted
    from reshard.packing.merge import merge as run

    with options.progress("merge", quiet) as progress:
        done = run(base, adapters, out, progress=progress, **arguments)
    options.print_result(
        quiet,
        as_json,
        lambda: {"version": 1, "out": str(out), "num_files": done.num_files, "nbytes": done.nbytes,
                 "num_merged": done.num_merged},
        lambda: f"merged {done.num_merged} tensors; wrote {counted(done.num_files, 'file')}, "
                f"{show_bytes(done.nbytes)}: {out}",
    )  # fmt: skip
