"""plan and layout: what a pack would do, before a byte moves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from manifests.command import defaults
from manifests.command.interpreter import collector_paused
from reshard.cli import options

if TYPE_CHECKING:
    from manifests.module_times import MeasuredTimes
    from reshard.estimate.assumptions import Assumptions
    from reshard.search.search import SearchResult

_GROUPS = {
    "Search": ("gpus", "memory_limit", "gpus_per_node", "hardware", "efficiency"),
    "What and where": ("layout", "pp", "write", "draw", "theme", "force", "drop", "model", "as_json", "quiet"),
    "Training step": (
        "global_batch", "num_microbatches", "microbatch", "seq_len", "dtype", "master_dtype", "optimizer", "ema",
        "recompute", "loss_chunk",
        "schedule", "microbatch_group", "write_schedule", "host_memory", "measured", "from_run",
    ),
    "Clusters": ("replicate", "shard", "tensor", "context", "context_method", "expert"),
}  # fmt: skip


_FIXED = {"pp": "pipeline"}  # Candidate's fields of other names
_SAME = ("schedule", "microbatch", "replicate", "shard", "context", "tensor", "expert", "recompute")


@click.command(cls=options.Verb, groups=_GROUPS)
@click.argument("source", type=click.Path(), metavar="SOURCE")
@options.layout_flags
@options.training_flags
@options.search_flags
@click.option(
    "--from-run", type=click.Path(path_type=Path), metavar="LOG_DIR",
    help="Take the seconds of modules from a run that traced steps, and its --seq-len, --microbatch, --dtype, "
    "--master-dtype and --ac where they are not given.",
)  # fmt: skip
@options.drop
@options.model
@options.write
@click.option(
    "--write-schedule", type=click.Path(path_type=Path), metavar="FILE.csv",
    help="Write the actions of a step, which --schedule reads, here and in a run.",
)  # fmt: skip
@click.option("--draw", type=click.Path(path_type=Path), metavar="FILE", help="Draw the plan as .svg or .png.")
@click.option(
    "--theme",
    type=click.Choice(["auto", "light", "dark"]),
    default="auto",
    help="Theme of .svg and .png; auto follows the reader's setting (.png: light).",
)
@options.force_file
@options.as_json
@options.quiet
@collector_paused()  # a step has up to half a million actions, which it would visit whenever it resumes
def plan(
    source: str, from_run: Path | None, write: Path | None, write_schedule: Path | None, draw: Path | None, theme: str,
    force: bool, as_json: bool, quiet: bool, search: Mapping[str, Any], **arguments: Any,
) -> None:  # fmt: skip
    """Show a layout's stages, bytes, FLOPs, memory and pipeline bubble. Nothing is packed.

    SOURCE is anything that pack takes, or just a config.json. With --gpus, the fastest layouts are searched for, and
    printed with the commands that pack and launch the first. The exit code is 0 whether or not a plan fits
    --gpu-memory.

    \b
    Examples:
      reshard plan ./Llama-3.2-1B --gpus 8 --gpu-memory 80GB --global-batch 512
      reshard plan ./Llama-3.2-1B --layout balance:time,pp=4 --gpu-memory 80GB --write layout.toml
    """
    from manifests.schedules.csvtext import write_csv
    from manifests.store import write_file
    from reshard.formatting import untied_notes
    from reshard.layouts.files import check_layout_file, write_layout
    from reshard.packing.plan import plan as run
    from reshard.report.plan_summary import plan_json, plan_text
    from reshard.report.search_table import search_json, search_text

    if draw:
        from reshard.draw import check_picture

        check_picture(draw, force)
    if write:
        check_layout_file(write, force=force)
    if write_schedule:
        _check_schedule_file(write_schedule, force=force)
    times = None if from_run is None else _times_of_run(from_run, quiet=quiet)
    if times is not None:
        arguments["assumed"] = _as_in_run(arguments["assumed"], times)
    if search["gpus"]:
        result = _search(source, search, times, **arguments)
        layout, untied = result.best[0].candidate.layout if result.best else None, result.untied
    else:
        _refuse_without_gpus(search)
        planned = run(source, **arguments)
        options.name_links(planned.links, quiet)
        if not quiet:
            _note_other_step(planned.assumed)
        layout, untied = planned.layout, planned.checkpoint.misread
        if write_schedule:
            write_file(write_schedule, write_csv(planned.forecast.assumed.table_for(planned.layout)).encode())
            if not quiet:
                click.echo(f"written: {write_schedule}", err=True)
    for note in () if quiet else untied_notes(untied):
        click.echo(note, err=True)
    if write and layout:
        write_layout(layout, write)
    if write and not quiet:
        click.echo(f"written: {write}" if layout else f"not written: {write}, as no layout fits", err=True)
    if draw:
        from reshard.draw import draw_plan, draw_search

        if search["gpus"]:
            draw_search(result, draw, theme)
        else:
            draw_plan(planned, draw, theme)
        if not quiet:
            click.echo(f"drawn: {draw}", err=True)
    # Last: with --json, the object of a failure would follow that of the plan.
    if search["gpus"]:
        click.echo(json.dumps(search_json(result)) if as_json else search_text(result))
    else:
        click.echo(json.dumps(plan_json(planned)) if as_json else plan_text(planned))


def _note_other_step(assumed: Assumptions) -> None:
    """Note that the times of --cost were measured with other options than those of the plan."""
    how = click.get_current_context().meta.get(options.MEASURED, {})
    planned = {"seq_len": assumed.seq_len, "microbatch": assumed.microbatch, "dtype": assumed.dtype}
    others = [name for name, value in planned.items() if how.get(name, value) != value]
    if shown := ", ".join(f"--{name.replace('_', '-')} {how[name]}" for name in others):
        click.echo(f"note: --cost was measured with {shown}, and the plan is of another step", err=True)


def _check_schedule_file(path: Path, *, force: bool) -> None:
    from manifests.errors import UsageError
    from manifests.schedules.csvtext import is_schedule_file
    from stores.folders.probe import check_new_file

    if not is_schedule_file(path.name):
        problem, hint = f"expected a name that ends in .csv, found {path}", f"use {path.with_suffix('.csv').name}"
        raise UsageError("--write-schedule", problem, hint, code="options.schedule-suffix")
    check_new_file(path, "--write-schedule", force=force)


# What times depend on, as the file and as Assumptions call it.
_OF_RUN = {
    "seq_len": "seq_len", "microbatch": "microbatch", "dtype": "dtype", "master_dtype": "master_dtype",
    "ac": "recompute",
}  # fmt: skip


def _times_of_run(log_dir: Path, *, quiet: bool) -> MeasuredTimes:
    """Read the times that a run wrote, with the options that they depend on.

    What a step takes beside its schedule grows with the parameters that it trains: of a part, it is left out.
    """
    from manifests.errors import InputError
    from manifests.module_times import TIMES_NAME, read_times
    from reshard.estimate.assumptions import check_run

    path = log_dir / TIMES_NAME
    if not path.is_file():
        hint = "give a run that traced some steps: runner launch … -- --trace 10-20"
        raise InputError(str(path), "no such file", hint, code="options.no-times")
    times = read_times(path)
    check_run(times, f"{path}: measured")
    if times.how.get("trained") != "part":
        return times
    if not quiet:
        click.echo(
            "note: the run trained a part of the parameters: its backwards are shorter than those of all, and what "
            "its steps take beside their schedules is left out",
            err=True,
        )
    return replace(times, step=times.step and replace(times.step, overhead_s=0.0))


def _as_in_run(assumed: Assumptions, times: MeasuredTimes) -> Assumptions:
    """Assume a run's options where they are not on the command line, and its times."""
    from manifests.models.training import parse_recompute

    context = click.get_current_context()
    changes: dict[str, Any] = {
        field: parse_recompute(str(times.how[name])) if name == "ac" else times.how[name]
        for name, field in _OF_RUN.items()
        if name in times.how and context.get_parameter_source(field) is not ParameterSource.COMMANDLINE
    }
    return replace(assumed, **changes, run=times)


def _refuse_without_gpus(search: Mapping[str, Any]) -> None:
    from manifests.errors import UsageError

    context = click.get_current_context()
    for name in search:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = "--" + name.replace("_", "-")
            raise UsageError(flag, "is only for --gpus", "add --gpus N, or remove it", code="options.missing-value")


def _search(
    source: str,
    search: Mapping[str, Any],
    times: MeasuredTimes | None,
    *,
    assumed: Assumptions,
    drop: tuple[str, ...],
    model: Path | None,
    **_: Any,
) -> SearchResult:
    """Search for layouts; flags of degrees on the command line are what all of them must have."""
    from manifests.errors import Parameter, UsageError
    from manifests.schedules.rules import schedule_named
    from reshard.estimate.module_seconds import hardware_in, read_hardware
    from reshard.search.candidates import SearchRequest
    from reshard.search.search import find_layouts

    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    alone = (
        "layout", "num_microbatches", "loss_chunk", "host_memory", "measured", "context_method",
        "microbatch_group", "write_schedule",
    )  # fmt: skip
    if conflicts := [name for name in alone if name in given]:
        raise UsageError(
            Parameter(conflicts[0]), "conflicts with --gpus", "remove one of them", code="options.conflict"
        )
    if assumed.memory_limit is None:
        problem, hint = "is required with --gpus", "pass the memory of a GPU, such as 80GB"
        raise UsageError(Parameter("assumed.memory_limit"), problem, hint, code="options.missing-value")
    fixed = {_FIXED.get(name, name): context.params[name] for name in given.intersection((*_FIXED, *_SAME))}
    if times is not None or given.intersection(("dtype", "master_dtype")):
        fixed["policy"] = assumed.policy
    if "schedule" in fixed:
        fixed["schedule"] = schedule_named(fixed["schedule"])
    numbers = {name: search[name] for name in ("gpus", "efficiency", "gpus_per_node")}
    seq_len = assumed.seq_len if times is not None or "seq_len" in given else defaults.SEARCH_SEQ_LEN
    batch, hardware = assumed.global_batch or max(512, search["gpus"]), read_hardware(search["hardware"])
    if times is not None and "hardware" not in given:
        hardware = hardware_in(times, hardware)
    request = SearchRequest(
        **numbers, memory_limit=assumed.memory_limit, global_batch=batch, seq_len=seq_len, hardware=hardware,
        fixed=fixed, measured=times, optimizer=assumed.optimizer, ema=assumed.ema,
    )  # fmt: skip
    return find_layouts(source, request, drop=drop, model=model)


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
@options.force_file
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
    if write:
        write_layout(stages, write)
        if not quiet:
            click.echo(f"written: {write}", err=True)
    click.echo(json.dumps(layout_json(stages)) if as_json else layout_text(stages))
