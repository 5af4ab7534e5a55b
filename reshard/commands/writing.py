"""pack and export: the verbs that write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reshard.commands import options

if TYPE_CHECKING:
    from reshard.blocks import Io
    from reshard.forecast import Assumptions
    from reshard.planning import LayoutRequest

__all__ = ["export", "pack"]


@click.command()
@click.argument("source")
@options.layout_flags
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write; it must not exist.")
@options.drop
@click.option("--virtual", is_flag=True, help="Write no tensor: let bundles refer to the bytes where they are.")
@click.option("--stages", metavar="N-M,...", help="Pack these stages alone; the others' bundles are virtual.")
@options.force
@options.io
@options.sync
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@options.as_json
@options.quiet
@options.training_flags
def pack(
    source: str, asked: LayoutRequest, assumed: Assumptions, out: Path, drop: tuple[str, ...], virtual: bool,
    stages: str | None, force: bool, io: Io, sync: bool, dry_run: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Write one bundle per stage, and a manifest.

    SOURCE is a Hugging Face folder or a manifest; packing a manifest cuts its bundles anew. What is assumed of
    training decides nothing but layouts that are solved for, and what --dry-run shows. Virtual bundles hold as long
    as SOURCE stays as it is; packing their manifest makes them real.

    \b
    Example:
      reshard pack ./Llama-3.2-1B --layout pp=2 --out ./Llama-3.2-1B-pp2
    """
    from reshard.engine import WriteOptions
    from reshard.pack import PackOptions
    from reshard.pack import pack as run
    from reshard.planning import model_name, plan_training
    from reshard.report.done import pack_json, pack_text
    from reshard.report.plan import plan_json, plan_text
    from reshard.source import open_source
    from reshard.virtual import choose_stages

    checkpoint = open_source(source, frozenset(drop))
    planned = plan_training(model_name(source), checkpoint, asked, assumed)
    if dry_run:
        click.echo(json.dumps(plan_json(planned)) if as_json else plan_text(planned))
        return
    for name in checkpoint.source.left_out:
        click.echo(f"left out: {name} (weights in a format that reshard does not read)", err=True)
    packed = choose_stages(planned.plan, virtual, stages)
    moved = [stage for stage in planned.plan.stages if packed is None or stage.index in packed]
    nbytes = sum(entry.nbytes for stage in moved for shard in stage.shards for entry in shard.entries)
    with options.progress("pack", nbytes, quiet) as progress:
        write = WriteOptions(io=io, sync=sync, progress=progress)
        manifest = run(checkpoint, planned.plan, PackOptions(out=out, force=force, stages=packed, write=write))
    click.echo(json.dumps(pack_json(manifest, out)) if as_json else pack_text(manifest, out))


@click.command()
@options.manifest
@click.option("--to", "form", type=click.Choice(["hf"]), required=True, help="Format to write.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write; it must not exist.")
@options.force
@options.io
@options.sync
@options.as_json
@options.quiet
def export(
    manifest: Path, form: str, out: Path, force: bool, io: Io, sync: bool, as_json: bool, quiet: bool
) -> None:  # fmt: skip
    """Write a manifest's model as a Hugging Face folder.

    Tensors that were not trained come back byte for byte, in the files they came from.

    \b
    Example:
      reshard export ./Llama-3.2-1B-pp2 --to hf --out ./Llama-3.2-1B-again
    """
    from reshard.engine import WriteOptions
    from reshard.export import export_huggingface
    from reshard.formats.bundles import open_manifest
    from reshard.report.done import export_json, export_text

    checkpoint = open_manifest(manifest)
    nbytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    with options.progress("export", nbytes, quiet) as progress:
        write = WriteOptions(io=io, sync=sync, progress=progress)
        done = export_huggingface(checkpoint, out, force=force, options=write)
    click.echo(json.dumps(export_json(done, form, out)) if as_json else export_text(done, out))
