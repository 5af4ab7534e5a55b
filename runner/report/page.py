"""One standalone HTML page about a run. No torch; matplotlib draws."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from manifests.errors import UserError
from manifests.schedules import Timeline
from runner.report.plan import planned
from runner.report.read import RunLog, StepTrace, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_report"]

_COLOURS = {"F": "#4c78a8", "B": "#e4572e", "I": "#f2a541", "W": "#76b041", "L": "#9d7ad2"}
_KINDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients", "L": "loss"}
_INK, _FAINT = "#1f2430", "#8a8f98"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e5e7eb; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; } p.note { color: #6b7280; max-width: 45rem; }
"""


def write_report(log_dir: Path, out: Path) -> str:
    """Write the page about the run with this log folder, and give what it comes to in a sentence.

    Raises:
        UserError: nothing to tell of, a page that cannot be written, or matplotlib is missing.
    """
    run = read_run(log_dir)
    try:
        parts = [f"<h1>{html.escape(log_dir.resolve().name)}</h1>", _summary(run), *_curves(run)]
    except ImportError as error:
        raise UserError("runner report", "matplotlib is not installed here", "pip install 'reshard[draw]'") from error
    said = f"{len(run.steps)} steps, last loss {run.steps[-1]['loss']:.6f}"
    if run.traces is not None:
        plan, step = planned(run.traces), _typical(run.traces.steps)
        parts += _pipeline(run, step, plan)
        said += f"; bubble {step.bubble:.1%} measured, {plan.bubble:.1%} planned"
    title = html.escape(log_dir.resolve().name)
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    try:
        out.write_text(page + "\n".join(parts) + "</html>\n")
    except OSError as error:
        raise UserError(str(out), f"cannot be written: {error.strerror}") from error
    return said


def _summary(run: RunLog) -> str:
    last = run.steps[-1]
    rates = [step["tokens_per_s"] for step in run.steps[1:] or run.steps]
    facts = {
        "steps": f"{run.steps[0]['step']} to {last['step']}",
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
        axes.set_ylabel("loss")

    def throughput(axes: Axes) -> None:
        axes.plot(steps, [line["tokens_per_s"] for line in run.steps], color=_COLOURS["W"], linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens/s")

    return [
        "<h2>Loss</h2>", _drawn(loss, 3.0), "<p class=note>Grey lines: checkpoints.</p>",
        "<h2>Throughput</h2>", _drawn(throughput, 2.2),
    ]  # fmt: skip


def _pipeline(run: RunLog, step: StepTrace, plan: Timeline) -> list[str]:
    assert run.traces is not None
    traces = run.traces
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
                ("bubble", f"{step.bubble:.1%}", f"{plan.bubble:.1%}"),
                ("schedule, ms", f"{step.seconds * 1e3:.1f}", f"{plan.makespan_s * 1e3:.1f}"),
            ],
        ),
        "<p class=note>Planned: the schedule's actions, each with the median time measured for its stage, and "
        "transfers that cost nothing. What was measured beyond that is communication, and ranks that took "
        "their time.</p>",
        *_memory(run),
    ]  # fmt: skip


def _memory(run: RunLog) -> list[str]:
    ranks: Sequence[Mapping[str, Any]] = run.steps[-1].get("ranks", ())
    if not ranks or "peak_nbytes" not in ranks[0]:
        return []
    rows = [
        (f"{rank}", f"{line['peak_nbytes'] / 2**30:.2f}",
         f"{line['planned_nbytes'] / 2**30:.2f}" if line.get("planned_nbytes") else "")
        for rank, line in enumerate(ranks)
    ]  # fmt: skip
    return ["<h2>Memory, in GiB</h2>", _table(("rank", "peak", "weights, gradients and moments"), rows)]


def _typical(steps: Sequence[StepTrace]) -> StepTrace:
    """Give the step that took the median time."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def _bar(axes: Axes, place: tuple[int, float, float], kind: str, microbatch: int, shade: int) -> None:
    """Draw an action at (rank, begin, end); the more stages of its rank come before its own, the paler."""
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
    """Draw into an SVG that stands in a page by itself."""
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
