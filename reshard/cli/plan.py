"""plan and layout: what a pack would do, before a byte moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from manifests.command.interpreter import collector_paused
from reshard.cli import options

_GROUPS = {
    "What and where": ("layout", "pp", "write", "draw", "theme", "force", "drop", "model", "as_json", "quiet"),
    "Training step": (
        "memory_limit", "schedule", "num_microbatches", "microbatch", "seq_len", "policy", "recompute", "loss_chunk",
        "host_memory", "measured",
    ),
    "Clusters": ("replicate", "shard", "tensor", "expert"),
}  # fmt: skip


@click.command(cls=options.Verb, groups=_GROUPS)
@click.argument("source", type=click.Path(), metavar="SOURCE")
@options.layout_flags
@options.training_flags
@options.drop
@options.model
@options.write
@click.option("--draw", type=click.Path(path_type=Path), metavar="FILE", help="Draw the plan as .svg, .png or .html.")
@click.option(
    "--theme",
    type=click.Choice(["auto", "light", "dark"]),
    default="auto",
    help="Theme of .svg and .png; auto follows the reader's setting (.png: light).",
)
@options.force
@options.as_json
@options.quiet
@collector_paused()  # a step has up to half a million actions, which it would visit whenever it resumes
def plan(
    source: str, write: Path | None, draw: Path | None, theme: str, force: bool, as_json: bool, quiet: bool,
    **arguments: Any,
) -> None:  # fmt: skip
    """Show a layout before a byte moves: its stages, bytes, FLOPs, memory and pipeline bubble.

    SOURCE is a Hugging Face folder or hub repository, a manifest, or just a config.json.

    \b
    Example:
      reshard plan ./Llama-3.2-1B --layout balance:time,pp=4 --gpu-memory 80GB --write layout.toml
    """
    from reshard.layouts.files import check_layout_file, write_layout
    from reshard.packing.plan import plan as run
    from reshard.report.plan_summary import plan_json, plan_text

    if draw:
        from reshard.draw import check_picture

        check_picture(draw, force)
    if write:
        check_layout_file(write, force=force)
    planned = run(source, **arguments)
    options.name_links(planned.links, quiet)
    click.echo(json.dumps(plan_json(planned)) if as_json else plan_text(planned))
    if write:
        write_layout(planned.layout, write)
        if not quiet:
            click.echo(f"written: {write}", err=True)
    if draw:
        from reshard.draw import draw_plan

        draw_plan(planned, draw, theme)
        if not quiet:
            click.echo(f"drawn: {draw}", err=True)


@click.command(cls=options.Verb)
@click.argument("spec", type=click.Path(), metavar="SPEC")
@click.option(
    "--layers",
    type=options.WholeNumber(1, options.MAX_LAYERS),
    required=True,
    metavar="N",
    help="Number of decoder layers.",
)
@click.option(
    "--mtp",
    type=options.WholeNumber(0, options.MAX_LAYERS),
    default=0,
    metavar="M",
    help="Number of multi-token prediction layers.",
)
@options.ranks
@options.cost
@options.write
@options.force
@options.as_json
@options.quiet
def layout(write: Path | None, force: bool, as_json: bool, quiet: bool, **arguments: Any) -> None:
    """Show what a layout means, without a model.

    \b
    Example:
      reshard layout 'Et*3|(tt|)*29,m|L' --layers 61 --mtp 1 --pp 16
    """
    from reshard.layouts.files import check_layout_file, write_layout
    from reshard.packing.plan import layout as run
    from reshard.report.plan_summary import layout_json, layout_text

    if write:
        check_layout_file(write, force=force)
    stages = run(**arguments)
    click.echo(json.dumps(layout_json(stages)) if as_json else layout_text(stages))
    if write:
        write_layout(stages, write)
        if not quiet:
            click.echo(f"written: {write}", err=True)
