"""pack and export: the commands that write."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import click

from reshard.cli import options, parts
from reshard.formats.table import TIED_KEY, export_targets, names_of_targets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.packing.pack import PreparedPack
    from reshard.transforms.cast import ExportDtype
    from stores.open import Address


_GROUPS = {
    "What and where": (
        "layout", "out", "pp", "force", "dry_run", "stages", "virtual", "drop", "model", "verify_source", "as_json",
        "quiet",
    ),
    "Bytes": ("dtype", "dequantize", "merge_slices", "max_shard_nbytes", "io", "sync", "num_threads"),
    "Remote": ("num_streams", "memory_nbytes"),
    "Clusters": (
        "part", "num_parts", "scheduler", "image", "mounts", "partition", "account", "time", "sbatch_arg",
    ),
}  # fmt: skip
_EXPORT_GROUPS = {
    "What and where": (
        "to", "out", "names", "dtype", "weights_only", "tied_key", "force", "as_json", "quiet",
    ),
    "Bytes": ("io", "sync", "num_threads"),
    "Remote": ("num_streams", "memory_nbytes"),
}  # fmt: skip


@click.command(cls=options.Verb, groups=_GROUPS)
@click.argument("source", type=click.Path(), metavar="SOURCE")
@options.layout_flags
@options.out_or_hub
@options.drop
@options.model
@click.option("--virtual", is_flag=True, help="Copy no tensors; bundles refer to the bytes in SOURCE.")
@click.option("--stages", metavar="N-M,...", help="Pack only these stages; the bundles of the others are virtual.")
@options.conversion_flags
@options.max_shard_size
@options.force
@options.io
@options.sync
@options.parallelism_flags
@parts.flags
@click.option(
    "--verify-source",
    is_flag=True,
    help="Compare the SHA-256 of every hub file, reading also what is not packed.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan, or the jobs of --scheduler, and exit.")
@options.as_json
@options.quiet
def pack(
    source: str, out: Address, division: parts.Division, dry_run: bool, as_json: bool, quiet: bool, **arguments: Any
) -> None:  # fmt: skip
    """Write one bundle per stage, a manifest, and an index that makes the output a Hugging Face folder.

    SOURCE is a Hugging Face folder or hub repository, or a manifest, which is resharded. A layout that is solved for
    (balance:) assumes the training step that reshard plan assumes by default; for another one, pack the file of
    reshard plan --write. Virtual bundles are valid as long as SOURCE is unchanged; packing their manifest copies the
    bytes.

    Objects in a bucket are written in order, and a shard's digests come first in it: tensors without a known digest are
    read twice, unless SOURCE is remote and the longest shard fits into --memory (see --max-shard-size). If reading is
    slow, pack into a folder, then pack that manifest into the bucket.

    With --out hf://org/name[@branch], the model is packed below HF_HOME, pushed in one commit, and removed there; see
    reshard push.

    Machines that share a file system or a bucket can each pack a --part, some of the shards, and reshard commit merges
    them; --parts N --scheduler slurm submits all of it. In a folder, the output is the same, byte for byte; in a
    bucket, shards stay below parts-KEY.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2
      reshard pack ./Llama-3.1-405B --layout pp=16 --out ./405B-pp16 --parts 8 --scheduler slurm --time 1:00:00
    """
    from reshard.packing.options import PackOptions
    from reshard.packing.pack import pack as run
    from reshard.report.done import hub_lines, pack_json, pack_text

    division.check()
    if division.is_submitted:
        checked = {name: arguments[name] for name in ("force", "verify_source", "virtual")}
        PackOptions(out=out, **checked).check_divided("--parts")

    def show(prepared: PreparedPack) -> None:
        """Print what is about to be packed; exit if it was a dry run, or once the parts are submitted."""
        if division.is_submitted:
            division.submit(source, prepared, dry_run=dry_run, as_json=as_json)
            raise click.exceptions.Exit
        options.name_links(prepared.staged.links, quiet)
        if dry_run:
            from reshard.report.plan_summary import plan_json, plan_text

            planned, traffic = prepared.planned, prepared.traffic
            click.echo(json.dumps(plan_json(planned, traffic)) if as_json else plan_text(planned, traffic))
            raise click.exceptions.Exit
        for note in () if quiet else _notes(prepared):
            click.echo(note, err=True)

    with options.progress("pack", quiet) as progress, options.upload_bars(out, quiet):
        done = run(source, out, part=division.part_to_pack(), on_plan=show, progress=progress, **arguments)
    for line in () if quiet else hub_lines(done.hub):
        click.echo(line, err=True)
    options.print_result(quiet, as_json, lambda: pack_json(done), lambda: pack_text(done))


_OPTIMIZER_OF_TRAINER = re.compile(r"optimizer\.pt|optimizer\.bin|optimizer_\d+(?=/)")  # with FSDP, the latter two


def _notes(prepared: PreparedPack) -> Iterator[str]:
    for name in prepared.left_out:
        yield f"left out: {name} (not part of the weights that are packed)"
    if state := next(filter(None, map(_OPTIMIZER_OF_TRAINER.match, prepared.left_out)), None):
        what = f"warning: {state[0]} is optimizer state of transformers' Trainer, which is not read"
        yield f"{what}: what is packed has weights alone, and training begins at step 1"
    if (step := prepared.assumed_step) is not None:
        yield f"{step}; reshard plan --write FILE solves for another step"
    for shard in prepared.large_headers:
        what = f"warning: the header of {shard.path} takes {shard.header_nbytes} bytes"
        yield f"{what}, and the Hugging Face hub reads up to 25 MB: use a smaller --max-shard-size"


@click.command(cls=options.Verb, groups=_EXPORT_GROUPS)
@options.manifest
@click.option(
    "--to",
    type=click.Choice(list(export_targets())),
    required=True,
    help="Format to write.",
)
@click.option(
    "--for",
    "names",
    type=click.Choice(names_of_targets()),
    default="hf",
    help="Whose names to use: torchtitan's with --to dcp, a PipelineModule's with --to universal.",
)
@click.option(
    "--tied-key",
    metavar="KEY",
    default=TIED_KEY,
    show_default=True,
    help="With --for pipeline: the key of the TiedLayerSpec of a tied embedding.",
)
@click.option("--weights-only", is_flag=True, help="With --to dcp, universal, megatron: leave out optimizer state.")
@options.out
@click.option(
    "--dtype",
    type=click.Choice(options.DTYPES),
    default="source",
    help="Dtype of the weights: as in the source, or one for all parameters.",
)
@options.force
@options.io
@options.sync
@options.parallelism_flags
@options.as_json
@options.quiet
def export(
    manifest: str, to: str, names: str, out: Address, dtype: ExportDtype, as_json: bool, quiet: bool, **arguments: Any
) -> None:  # fmt: skip
    """Write a manifest's model as a Hugging Face folder, or as a checkpoint that another trainer loads.

    In a Hugging Face folder, untrained tensors are restored byte for byte, in the files that they came from.
    Tensors that were trained in a dtype other than the source's are rounded to the source's, unless --dtype says
    otherwise. A DCP folder (--to dcp) has weights as they were trained and, if there is any, optimizer state. --to
    deepspeed writes the layers of DeepSpeed's PipelineModule, and --to universal its Universal Checkpoint, in
    float32. --to megatron writes what Megatron-LM loads, with the state of its distributed optimizer. A bucket
    cannot replace the files of a model in one step: there, --force removes the old ones first.

    \b
    Example:
      reshard export ./Llama-3.2-1B-pp2 --to hf --out ./Llama-3.2-1B-again
      reshard export ./checkpoints/step-1000 --to dcp --for torchtitan --out ./outputs/checkpoint/step-1000
      reshard export ./Llama-3.2-1B-pp2 --to deepspeed --out ./Llama-3.2-1B-deepspeed
    """
    from reshard.formats.export import export as run
    from reshard.report.done import export_json, export_text

    with options.progress("export", quiet) as progress:
        done = run(manifest, out, to=to, names=names, dtype=dtype, progress=progress, **arguments)
    options.print_result(
        quiet, as_json, lambda: export_json(done, to, out), lambda: export_text(done, to, names, dtype, out)
    )
