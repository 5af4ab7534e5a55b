"""One standalone HTML page about a run. No torch; matplotlib draws."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from manifests.errors import (
    InputError,
    LaunchError,
    OutputError,
    UsageError,
)
from manifests.probe import check_new_file
from manifests.schedules import Timeline
from manifests.store import write_file
from runner.report.read import RunLog, StepTrace, Traces, read_run
from runner.report.simulated import planned
from runner.rundir.run_record import config_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["tables_of", "write_report"]

_COLOURS = {"F": "#4c78a8", "B": "#e4572e", "I": "#f2a541", "W": "#76b041", "L": "#9d7ad2"}
_KINDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients", "L": "loss"}
_PARTS = ("data", "compute", "communication", "bubble")
_SUFFIXES = (".html", ".htm")
_INK, _FAINT = "#1f2430", "#8a8f98"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e5e7eb; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; } p.note { color: #6b7280; max-width: 45rem; }
"""


def write_report(log_dir: Path, out: Path, *, force: bool = False) -> str:
    """Write the page about the run with this log folder, and return its summary in a sentence.

    Raises:
        UsageError: the name of the page is that of another kind of file.
        InputError: the page exists and `force` is not given, or its folder takes no file.
        UserError: nothing to tell of, a page that cannot be written, or matplotlib is missing.
    """
    if out.suffix not in _SUFFIXES:
        raise UsageError(
            "--out", f"expected a name that ends in {' or '.join(_SUFFIXES)}, found {out}", code="options.report-suffix"
        )
    if not log_dir.is_dir():
        raise LaunchError(str(log_dir), "no such folder", "use the log folder of a run", code="launch.no-run")
    check_new_file(out, "--out", force=force)
    run = read_run(log_dir)
    try:
        parts = [
            f"<h1>{html.escape(log_dir.resolve().name)}</h1>",
            _identity(run),
            _summary(run),
            *_curves(run),
            *_times(run),
        ]
    except ImportError as error:
        raise InputError(
            "runner report",
            "matplotlib is not installed here",
            "pip install 'reshard[draw]'",
            code="system.missing-package",
        ) from error
    said = f"{len(run.steps)} steps, last loss {run.steps[-1]['loss']:.6f}"
    if run.traces is not None:
        plan = planned(run.traces)
        parts += _pipeline(run.traces, _typical(run.traces.steps), plan)
        said += f"; bubble {run.traces.bubble:.1%} measured, {plan.bubble:.1%} planned"
    else:
        parts.append("<p class=note>No step was traced: with --trace 20-30 the pipeline is drawn here.</p>")
    parts += _memory(run)
    title = html.escape(log_dir.resolve().name)
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    try:
        write_file(out, (page + "\n".join(parts) + "</html>\n").encode(errors="replace"), is_durable=False)
    except OSError as error:
        raise OutputError(str(out), f"cannot be written: {error.strerror}", code="output.unwritable") from error
    return said


def tables_of(run: RunLog) -> tuple[str, ...]:
    """Return the tables of a run's page that need no trace."""
    return (_identity(run), _summary(run), *_times(run), *_memory(run))


def _identity(run: RunLog) -> str:
    """Return what the run is, from its record: nothing for a run without one."""
    config = {name: str(value) for name, value in config_of(run.record).items()}
    versions = [f"{name.removeprefix('version/')} {config[name]}" for name in config if name.startswith("version/")]
    facts = {"run": ("name", "run"), "model": ("manifest",), "manifest digest": ("manifest_digest",)}
    facts |= {"command": ("command",), "host": ("host",), "ranks": ("num_ranks",)}
    rows = [(fact, " ".join(config[name] for name in names if name in config)) for fact, names in facts.items()]
    return _table(("", ""), [row for row in (*rows, ("versions", ", ".join(versions))) if row[1]])


def _summary(run: RunLog) -> str:
    last = run.steps[-1]
    rates = [step["tokens_per_s"] for step in run.steps[1:] or run.steps]
    facts = {
        "steps": f"{run.steps[0]['step']} to {last['step']}",
        **({"attempts": f"{len(run.begins)}, from steps {', '.join(map(str, run.begins))}"} if run.begins[1:] else {}),
        "loss": f"{run.steps[0]['loss']:.4f} to {last['loss']:.4f}",
        "tokens/s, median": f"{median(rates):,.0f}",
        "checkpoints": f"{len(run.checkpoints)}",
    }
    if run.checkpoints:
        facts["stall of a save, median"] = f"{median(line['stall_s'] for line in run.checkpoints) * 1e3:.1f} ms"
    if run.evaluations:
        facts["evaluation loss, last"] = f"{run.evaluations[-1]['eval_loss']:.4f}"
    if last.get("mfu") is not None:
        facts["MFU, last"] = f"{last['mfu']:.1%}"
    return _table(("", ""), list(facts.items()))


def _curves(run: RunLog) -> list[str]:
    steps = [line["step"] for line in run.steps]

    def loss(axes: Axes) -> None:
        axes.plot(steps, [line["loss"] for line in run.steps], color=_COLOURS["F"], linewidth=1.4, label="training")
        if run.evaluations:
            at, found = zip(*((line["step"], line["eval_loss"]) for line in run.evaluations), strict=True)
            axes.plot(at, found, "o", color=_COLOURS["B"], markersize=4, label="evaluation")
            axes.legend(frameon=False)
        for line in run.checkpoints:
            axes.axvline(line["step"], color=_FAINT, linewidth=0.5, zorder=0)
        for step in run.begins[1:]:
            axes.axvline(step, color=_COLOURS["L"], linewidth=0.8, linestyle=":", zorder=0)
        axes.set_ylabel("loss")
        axes.set_xlabel("step")

    def throughput(axes: Axes) -> None:
        axes.plot(steps, [line["tokens_per_s"] for line in run.steps], color=_COLOURS["W"], linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens/s")
        axes.set_xlabel("step")

    marks = ["Gray lines: checkpoints."] if run.checkpoints else []
    marks += ["Dotted lines: where an attempt began."] if run.begins[1:] else []
    return [
        "<h2>Loss</h2>", _drawn(loss, 3.2), f"<p class=note>{' '.join(marks)}</p>" if marks else "",
        "<h2>Throughput</h2>", _drawn(throughput, 2.4),
    ]  # fmt: skip


def _times(run: RunLog) -> list[str]:
    """Return the step-time breakdown of each pipeline rank."""
    ranks = range(len(run.steps[-1].get("bubble_s", ())))
    if not ranks:
        return []
    # An earlier attempt may have had more ranks, or fewer.
    lines = [line for line in run.steps[1:] or run.steps if len(line.get("bubble_s", ())) == len(ranks)]
    rows = []
    for rank in ranks:
        parts = [median(line[f"{name}_s"][rank] for line in lines) for name in _PARTS]
        rows.append((f"{rank}", *(f"{seconds * 1e3:.1f}" for seconds in parts)))
    whole_s = median(line["step_s"] for line in lines)
    return [
        "<h2>Where the time of a step goes, in ms</h2>", _table(("pipeline rank", *_PARTS), rows),
        f"<p class=note>Medians over {len(lines)} steps, until the gradients' norm is known; a step with its "
        f"optimizer takes {whole_s * 1e3:.1f} ms.</p>",
    ]  # fmt: skip


def _pipeline(traces: Traces, step: StepTrace, plan: Timeline) -> list[str]:
    kinds = [kind for kind in _KINDS if any(traces.seconds_of(kind))]
    rows = [
        (f"{stage}", f"{traces.placement.rank_of(stage)}",
         *(f"{traces.seconds_of(kind)[stage] * 1e3:.2f}" for kind in kinds))
        for stage in range(traces.placement.num_stages)
    ]  # fmt: skip

    def measured(axes: Axes) -> None:
        for rank, actions in enumerate(step.ranks):
            for action in actions:
                shade = traces.placement.virtual_of(action.stage)
                _bar(axes, (rank, action.begin_s, action.end_s), action.kind, action.microbatch, shade)
        _finish_bars(axes, len(step.ranks), max(step.seconds, plan.makespan_s))

    def simulated(axes: Axes) -> None:
        for rank, spans in enumerate(plan.ranks):
            for span in spans:
                action = span.action
                shade = traces.placement.virtual_of(action.stage)
                _bar(axes, (rank, span.start_s, span.end_s), action.kind, action.microbatch, shade)
        _finish_bars(axes, len(plan.ranks), max(step.seconds, plan.makespan_s))

    height = 0.9 + 0.34 * len(step.ranks)
    legend = ", ".join(f'<span style="color:{_COLOURS[kind]}">■</span> {_KINDS[kind]}' for kind in kinds)
    return [
        "<h2>Time of one microbatch on each stage, in ms</h2>",
        _table(("stage", "rank", *(_KINDS[kind] for kind in kinds)), rows),
        f"<h2>Pipeline: step {step.step} as it ran</h2>", f"<p>{legend}</p>", _drawn(measured, height),
        f"<h2>The same step as {html.escape(traces.schedule)} plans it</h2>", _drawn(simulated, height),
        _table(
            ("", "measured", "planned"),
            [
                ("bubble", f"{traces.bubble:.1%}", f"{plan.bubble:.1%}"),
                ("schedule, ms", f"{traces.seconds * 1e3:.1f}", f"{plan.makespan_s * 1e3:.1f}"),
            ],
        ),
        f"<p class=note>Measured: the median of {_counted(len(traces.steps), 'traced step')}, from the first action of "
        "any rank to the last; what is not computing is bubble. Planned: the schedule's actions, each with the median "
        "time measured for its stage, and transfers that cost nothing. The difference is communication, and actions "
        "that took longer than others.</p>",
    ]  # fmt: skip


def _memory(run: RunLog) -> list[str]:
    """Compare each rank's memory with the plan; a run that was killed has the peak of rank 0 alone."""
    last = run.steps[-1]
    peaks = run.peaks_nbytes or ({0: last["peak_nbytes"]} if "peak_nbytes" in last else {})
    rows = []
    for load in run.loads:
        rank, base, planned = load["rank"], load.get("base_nbytes", 0), load.get("planned_nbytes")
        own = peaks[rank] - base if rank in peaks else None
        shown = [_mib(base), _mib(own), _mib(planned), f"{own / planned:.2f}" if own and planned else ""]
        rows.append((f"{rank}", ", ".join(map(str, load["stages"])), *shown))
    if not rows:
        return []
    heads = ("rank", "stages", "before", "training, at its peak", "planned", "peak / planned")
    notes = [
        "Planned: weights, gradients, optimizer state, activations and receive buffers, as reshard plan counts them."
    ]
    if any(load.get("base_nbytes") for load in run.loads):
        notes.append("Ranks on the host also use memory for loading, the network and Python itself.")
    if len(peaks) < len(rows):
        notes.append("The run did not finish: the peaks of the other ranks are unknown.")
    return ["<h2>Memory, in MiB</h2>", _table(heads, rows), f"<p class=note>{' '.join(notes)}</p>"]


def _mib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:,.1f}"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _typical(steps: Sequence[StepTrace]) -> StepTrace:
    """Return the step with the median time."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def _bar(axes: Axes, place: tuple[int, float, float], kind: str, microbatch: int, shade: int) -> None:
    """Draw an action at (rank, begin, end), paler for later stages of its rank."""
    rank, begin_s, end_s = place
    axes.barh(
        rank, (end_s - begin_s) * 1e3, left=begin_s * 1e3, height=0.78, color=_COLOURS[kind], edgecolor="white",
        linewidth=0.4, alpha=max(0.4, 1 - 0.3 * shade),
    )  # fmt: skip
    if kind != "L":
        axes.text((begin_s + end_s) * 500, rank, str(microbatch), ha="center", va="center", color="white",
                  fontsize=6, clip_on=True)  # fmt: skip


def _finish_bars(axes: Axes, num_ranks: int, seconds: float) -> None:
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.set_ylim(num_ranks - 0.5, -0.5)
    axes.set_xlim(0, seconds * 1e3)
    axes.set_xlabel("ms")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _drawn(draw: Callable[[Axes], None], height: float) -> str:
    """Draw into an SVG for an HTML page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=8)
    draw(axes)
    stream = io.StringIO()
    figure.savefig(stream, format="svg")
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head) if any(head) else ""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
