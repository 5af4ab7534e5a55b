"""pack and export: the verbs that write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

import click

from reshard.cli import options
from reshard.cli import pack_parts as parts

if TYPE_CHECKING:
    from reshard.copy.direct_io import Io
    from reshard.estimate.training_estimate import Assumptions
    from reshard.operations.resolve import LayoutRequest
    from reshard.transforms.cast import Dtype
    from reshard.transforms.conversion import Conversion
    from stores.manifest_file import Address

__all__ = ["export", "pack"]


@click.command()
@click.argument("source", type=click.Path(), metavar="SOURCE")
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
@click.option(
    "--verify-source",
    is_flag=True,
    help="Read all of a hub's files, also what is not packed, and compare their SHA-256.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan, or the jobs of --scheduler, and stop.")
@options.allow_remote
@options.as_json
@options.quiet
@options.training_flags
def pack(
    source: str, asked: LayoutRequest, assumed: Assumptions, out: Address, drop: tuple[str, ...], virtual: bool,
    stages: str | None, conversion: Conversion, force: bool, io: Io, sync: bool,
    division: parts.Division, verify_source: bool, dry_run: bool, as_json: bool, quiet: bool,
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
    from reshard.operations.prepare_pack import PackRequest, prepare_pack
    from reshard.report.done import hub_lines, pack_json, pack_text, part_json, part_text
    from reshard.report.plan import plan_json, plan_text

    division.check(out, virtual=virtual, verify_source=verify_source)
    prepared = prepare_pack(
        PackRequest(
            source=source, out=out, asked=asked, assumed=assumed, conversion=conversion, drop=drop, virtual=virtual,
            stages=stages, part=parts.part_of(division), force=force, io=io, sync=sync, verify_source=verify_source,
        )
    )  # fmt: skip
    if division.scheduler is not None:  # with a plan that can be packed
        parts.submit(division, out, force=force, dry_run=dry_run, as_json=as_json)
        return
    if dry_run:
        planned, traffic = prepared.planned, prepared.traffic
        click.echo(json.dumps(plan_json(planned, traffic)) if as_json else plan_text(planned, traffic))
        return
    for name, found in () if quiet else prepared.links:
        click.echo(f"link out of SOURCE: {name} -> {found}", err=True)
    for name in () if quiet else prepared.left_out:
        click.echo(f"left out: {name} (weights that transformers does not read beside safetensors)", err=True)
    with options.progress("pack", quiet) as progress:
        if division.part is not None:
            part, nbytes = prepared.run_part(progress), prepared.nbytes
            options.say_done(quiet, as_json, lambda: part_json(part, nbytes), lambda: part_text(part, nbytes, out))
            return
        done = prepared.run(progress)
    for line in () if quiet else hub_lines(done.hub):
        click.echo(line, err=True)
    options.say_done(quiet, as_json, lambda: pack_json(done), lambda: pack_text(done))


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
@options.allow_remote
@options.as_json
@options.quiet
def export(
    manifest: str, form: Literal["hf"], out: Address, dtype: Dtype, force: bool, io: Io, sync: bool,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Write a manifest's model as a Hugging Face folder.

    Tensors that were not trained come back byte for byte, in the files they came from. Those that were trained in
    another dtype than the source's are rounded to that one, unless --dtype says otherwise. In a bucket, where files
    of a model cannot be exchanged in one step, --force removes the old ones first.

    \b
    Example:
      reshard export ./Llama-3.2-1B-pp2 --to hf --out ./Llama-3.2-1B-again
    """
    from reshard.api.export import export as run
    from reshard.report.done import export_json, export_text

    with options.progress("export", quiet) as progress:
        done = run(manifest, out, to=form, dtype=dtype, force=force, io=io, sync=sync, progress=progress)
    options.say_done(quiet, as_json, lambda: export_json(done, form, out), lambda: export_text(done, dtype, out))
