"""pack and export: the verbs that write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from manifests.errors import UsageError
from reshard.commands import options, parts

if TYPE_CHECKING:
    from reshard.blocks import Io
    from reshard.casting import Dtype
    from reshard.conversion import Conversion
    from reshard.forecast import Assumptions
    from reshard.planning import LayoutRequest
    from stores.manifest_file import Address

__all__ = ["export", "pack"]


@click.command()
@click.argument("source")
@options.layout_flags
@options.out
@options.drop
@click.option("--virtual", is_flag=True, help="Write no tensor: let bundles refer to the bytes where they are.")
@click.option("--stages", metavar="N-M,...", help="Pack these stages alone; the others' bundles are virtual.")
@options.conversion_flags
@options.force
@options.io
@options.sync
@parts.flags
@click.option("--dry-run", is_flag=True, help="Print the plan, or the jobs of --scheduler, and stop.")
@options.as_json
@options.quiet
@options.training_flags
def pack(
    source: str, asked: LayoutRequest, assumed: Assumptions, out: Address, drop: tuple[str, ...], virtual: bool,
    stages: str | None, conversion: Conversion, force: bool, io: Io, sync: bool,
    division: parts.Division, dry_run: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Write one bundle per stage, and a manifest.

    SOURCE is a Hugging Face folder or a manifest; packing a manifest cuts its bundles anew. What is assumed of
    training decides nothing but layouts that are solved for, and what --dry-run shows. Virtual bundles hold as long
    as SOURCE stays as it is; packing their manifest makes them real.

    Into a bucket, a shard goes from its first byte to its last, and the digests stand at its start: tensors of which
    none is known are read twice. Where reading is slow, pack into a folder, and its manifest into the bucket.

    Machines that share a file system divide the work with --part, each its own; reshard commit ends it. Slurm
    does both with --parts N --scheduler slurm. The bytes are those of one pack.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2
      reshard pack ./Llama-3.1-405B --layout pp=16 --out ./405B-pp16 --parts 8 --scheduler slurm --time 1:00:00
    """
    from reshard.conversion import convert
    from reshard.engine import WriteOptions
    from reshard.pack import PackOptions
    from reshard.pack import pack as run
    from reshard.parts import pack_part
    from reshard.plan import traffic_of
    from reshard.planning import lay_out, look_ahead, model_name
    from reshard.report.done import pack_json, pack_text, part_json, part_text
    from reshard.report.plan import plan_json, plan_text
    from reshard.shares import part_nbytes, part_traffic
    from reshard.source import open_source
    from reshard.target import check_apart, read_again
    from reshard.virtual import choose_stages

    if conversion.changes_bytes and (virtual or stages is not None):
        raise UsageError(
            "--virtual" if virtual else "--stages",
            "bytes that stay where they are cannot be converted",
            "pack without it",
        )
    division.check(out, virtual=virtual)
    part = parts.part_of(division)
    opened = open_source(source, frozenset(drop))
    check_apart(out, opened, may_replace=not conversion.changes_bytes)
    checkpoint = convert(opened, conversion)
    laid = lay_out(model_name(source), checkpoint, asked, assumed)
    packed = choose_stages(laid.plan, virtual, stages)
    if division.scheduler is not None:  # with a plan that can be packed
        parts.submit(division, out, force=force, dry_run=dry_run, as_json=as_json)
        return
    shards = laid.plan.shards_on(packed)
    again = read_again(shards, out)
    if dry_run:
        planned, traffic = look_ahead(laid), part_traffic(shards, part) if part else traffic_of(shards, again)
        click.echo(json.dumps(plan_json(planned, traffic)) if as_json else plan_text(planned, traffic))
        return
    for name in checkpoint.source.left_out:
        click.echo(f"left out: {name} (weights that transformers does not read beside safetensors)", err=True)
    nbytes = sum(tensor.nbytes for tensor in (*again, *(origin for shard in shards for origin in shard.origins)))
    if part is not None:
        nbytes = part_nbytes(shards, part)
    with options.progress("pack", nbytes, quiet) as progress:
        write = WriteOptions(io=io, sync=sync, progress=progress)
        asked_for = PackOptions(out=out, force=force, stages=packed, write=write)
        if part is not None:
            pack_part(checkpoint, laid.plan, part, asked_for)
            click.echo(json.dumps(part_json(part, nbytes)) if as_json else part_text(part, nbytes, out))
            return
        manifest = run(checkpoint, laid.plan, asked_for)
    click.echo(json.dumps(pack_json(manifest, out)) if as_json else pack_text(manifest, out))


@click.command()
@options.manifest
@click.option("--to", "form", type=click.Choice(["hf"]), required=True, help="Format to write.")
@options.out
@click.option(
    "--dtype",
    type=click.Choice(options.DTYPES),
    default="source",
    help="Dtype of the weights: each tensor's in the source, or one for all parameters.",
)
@options.force
@options.io
@options.sync
@options.as_json
@options.quiet
def export(
    manifest: str, form: str, out: Address, dtype: Dtype, force: bool, io: Io, sync: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Write a manifest's model as a Hugging Face folder.

    Tensors that were not trained come back byte for byte, in the files they came from. Those that were trained in
    another dtype than the source's are rounded to that one, unless --dtype says otherwise. In a bucket, where files
    of a model cannot be exchanged in one step, --force removes the old ones first.

    \b
    Example:
      reshard export ./Llama-3.2-1B-pp2 --to hf --out ./Llama-3.2-1B-again
    """
    from reshard.casting import cast_checkpoint
    from reshard.engine import WriteOptions
    from reshard.export import export_huggingface
    from reshard.formats.bundles import open_manifest
    from reshard.report.done import export_json, export_text

    checkpoint = cast_checkpoint(open_manifest(manifest), dtype)
    nbytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    with options.progress("export", nbytes, quiet) as progress:
        write = WriteOptions(io=io, sync=sync, progress=progress)
        done = export_huggingface(checkpoint, out, force=force, dtype=dtype, options=write)
    click.echo(json.dumps(export_json(done, form, out)) if as_json else export_text(done, dtype, out))
