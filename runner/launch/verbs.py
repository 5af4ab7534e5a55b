"""`runner status`, `logs`, `cancel` and `report`, by the log folder of a job: the latest, or the given one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from runner.config.declared import WholeNumber
from runner.rundir.run_record import DEFAULT_RUNS, find_run

_LOG_DIR = click.argument(
    "log_dir", type=click.Path(path_type=Path), metavar="[LOG_DIR]", default=DEFAULT_RUNS,
    callback=lambda _, __, path: find_run(path),
)  # fmt: skip


@click.command()
@_LOG_DIR
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(log_dir: Path, as_json: bool) -> None:
    """Show the state of a launched job, its progress, and why it failed.

    LOG_DIR is the log folder of a run, by default the latest in runner-log.

    \b
    Example:
      runner status runner-log/latest
    """
    from runner.launch import follow as watch

    state = watch.status(log_dir)
    if as_json:
        click.echo(json.dumps(state))
        return
    why = f" ({state['reason']})" if state.get("reason") else ""
    where = f" on {state['nodes']}" if state.get("nodes") else ""
    again = f", requeued {state['requeues']} times" if state.get("requeues") else ""
    click.echo(f"{state['name']}: {state['scheduler']} job {state['id']} is {state['state']}{why}{where}{again}")
    if state["last_step"] is not None:
        loss = f", loss {state['last_loss']:.6f}" if state["last_loss"] is not None else ""
        saved = f", last checkpoint {state['last_checkpoint']}" if state["last_checkpoint"] else ""
        of = f" of {state['num_steps']}" if state["num_steps"] is not None else ""
        click.echo(f"step {state['last_step']}{of}{loss}{saved}")
    for rank in state["silent_ranks"]:
        click.echo(f"no heartbeat from {rank}")
    if state["error"]:
        click.echo(f"error: {state['error']}")


@click.command()
@_LOG_DIR
@click.option("-f", "--follow", is_flag=True, help="Print new output until the job ends.")
@click.option("--rank", type=WholeNumber(min=0), metavar="R", help="Show only the log of this rank.")
def logs(log_dir: Path, follow: bool, rank: int | None) -> None:
    """Print the output of a launched job; for a job on this machine, that of rank 0.

    LOG_DIR is the log folder of a run, by default the latest in runner-log.

    \b
    Example:
      runner logs --follow
    """
    from runner.launch import follow as watch

    watch.show_logs(log_dir, lambda text: click.echo(text, nl=False), rank=rank, is_followed=follow)


@click.command()
@_LOG_DIR
@click.option("--force", is_flag=True, help="Kill a job of this machine at once, without saving.")
def cancel(log_dir: Path, force: bool) -> None:
    """Cancel a launched job; if it saves checkpoints, it saves one first.

    LOG_DIR is the log folder of a run, by default the latest in runner-log.

    \b
    Example:
      runner cancel runner-log/latest
    """
    from runner.launch import follow as watch

    record, was_running = watch.cancel(log_dir, is_forced=force)
    job = f"{record.scheduler} job {record.id}"
    click.echo(f"cancelled {job}" if was_running else f"{job} has ended already")


@click.command()
@_LOG_DIR
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", show_default="LOG_DIR/report.html", help="Page to write."
)
@click.option("--compare", type=click.Path(path_type=Path), metavar="LOG_DIR", help="Draw this run beside it.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the traced steps of all ranks as one .json file for ui.perfetto.dev, too.",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
def report(log_dir: Path, out: Path | None, compare: Path | None, trace: Path | None, force: bool) -> None:
    """Write a run as one HTML page: loss, throughput and, for steps with --trace, the pipeline.

    LOG_DIR is the log folder of a run, by default the latest in runner-log.

    \b
    Example:
      runner launch ./packed -- --data text/ --steps 100 --trace 20-30 && runner report
    """
    from runner.report.page import write_report, write_trace

    path = out or log_dir / "report.html"
    summary = write_report(log_dir, path, force=force, other_dir=compare)
    click.echo(f"{path}: {summary}")
    if trace is not None:
        num_steps = write_trace(log_dir, trace, force=force)
        click.echo(f"{trace}: {num_steps} traced steps; open it in https://ui.perfetto.dev")
