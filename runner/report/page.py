"""One standalone HTML page about a run, or about two that are compared. No torch."""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from statistics import mean, median

from manifests.command.palette import WORK_COLORS
from manifests.errors import LaunchError, LogError, UsageError, UserError, system_errors
from manifests.schedules.picture import legend_of, pipeline_svg
from manifests.schedules.simulation import Timeline
from manifests.store import write_file
from runner.profiling.step_times import PARTS
from runner.report.charts import STYLE, Curve, draw_curves, draw_load
from runner.report.perfetto import merged_trace
from runner.report.read import RunLog, StepTrace, Traces, read_run
from runner.rundir.records import config_of
from stores.folders.probe import check_new_file

_PARTS = ("data", "compute", "communication", "bubble")
_SUFFIXES = (".html", ".htm")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 75rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--faint);
  vertical-align: top; }
th, td { overflow-wrap: normal; }
th:first-child, td:first-child, table.facts :is(th, td) { text-align: left; }
table.facts td:not(:first-child) { overflow-wrap: anywhere; min-width: 9rem; }
p.note, p.zoom { color: var(--quiet); } p.note { max-width: 50rem; }
p.lead { font-size: 1.1rem; } p.alarm { color: var(--alarm); font-weight: bold; }
p.legend, p.zoom { font-size: 13px; margin: .4rem 0; } p.legend span { margin-right: 1rem; white-space: nowrap; }
button { font: inherit; color: var(--ink); background: var(--faint); border: 1px solid var(--quiet);
  border-radius: 4px; padding: .1rem .6rem; margin: 0 .3rem .3rem 0; }
svg.chart, svg.pipeline, svg.heat { display: block; } svg.pipeline { touch-action: pan-y; }
svg.chart, svg.heat { margin-left: 3rem; width: calc(100% - 3rem); overflow: visible; } .load { fill: var(--ink); }
.tip { position: fixed; max-width: 20rem; padding: .3rem .6rem; border: 1px solid var(--quiet); border-radius: 4px;
  background: var(--paper); color: var(--ink); font-size: 13px; white-space: pre-line; pointer-events: none; }
@media (max-width: 700px) { svg text.number:not([visibility=visible]) { visibility: hidden; }
  table { font-size: 13px; } th, td { padding-right: .5rem; } }
@media print { .table { overflow: visible; } table { font-size: 8pt; } p.zoom, .tip { display: none; }
  body { margin: 0; max-width: none; } tr, svg.chart { break-inside: avoid; } h2 { break-after: avoid; } }
"""


def write_report(log_dir: Path, out: Path, *, force: bool = False, other_dir: Path | None = None) -> str:
    """Write the page about the run with this log folder, and return its first sentence.

    Another run is drawn beside it if its log folder is given.
    """
    if out.suffix not in _SUFFIXES:
        raise UsageError(
            "--out", f"expected a name that ends in {' or '.join(_SUFFIXES)}, found {out}", code="options.report-suffix"
        )
    if log_dir.is_dir():  # else that is what is wrong, and not the page in it
        check_new_file(out, "--out", force=force)
    run, other = _read(log_dir), _read(other_dir) if other_dir else None
    title = (
        f"{log_dir.resolve().name}, compared with {other_dir.resolve().name}" if other_dir else log_dir.resolve().name
    )
    runs = {log_dir.resolve().name: run}
    if other_dir and other:
        name = other_dir.resolve().name
        runs[name if name not in runs else str(other_dir.resolve())] = other
    plans, notes = dict[str, Timeline](), []
    for name, log in runs.items():
        try:
            plans |= {} if log.traces is None else {name: log.traces.planned()}
        except UserError as error:  # such as of a schedule file that is on another machine
            of = f" of {name}" if other else ""
            notes.append(f"The pipeline{of} is drawn without its plan: {error.where}: {error.problem}.")
    sentences = {name: _sentence(log, plans.get(name)) for name, log in runs.items()}
    parts = [f"<h1>{html.escape(title)}</h1>", *_alarms(runs)]
    parts += [
        f"<p class=lead>{html.escape(f'{name}: {sentence}' if other else sentence)}.</p>"
        for name, sentence in sentences.items()
    ]
    parts += _curves(runs)
    if run.traces is None:
        parts.append("<p class=note>No step was traced by every rank: --trace 20-30 draws the pipeline here.</p>")
    parts += [f"<p class=note>{html.escape(note)}</p>" for note in notes]
    parts += _pipelines({name: (log.traces, plans.get(name)) for name, log in runs.items() if log.traces is not None})
    for name, log in runs.items():
        of = f": {html.escape(name)}" if other else ""
        sections = (*_times(log), *draw_load(log.steps), *_start(log), *_memory(log))
        parts += [part.replace("</h2>", f"{of}</h2>", 1) for part in sections]
    parts += ["<h2>Run</h2>", _facts(runs)]
    _write(out, _page(title, parts).encode(errors="replace"))
    return next(iter(sentences.values()))


def write_trace(log_dir: Path, out: Path, *, force: bool = False) -> int:
    """Write the traced steps of all pipeline ranks as one trace for Perfetto, and return their number."""
    check_new_file(out, "--perfetto", force=force)
    traces = _read(log_dir).traces
    if traces is None:
        hint = "run with --trace FIRST-LAST"
        raise LogError(str(log_dir / "trace"), "no step was traced by every rank", hint, code="log.no-trace")
    _write(out, merged_trace(traces))
    return len(traces.steps)


def _read(log_dir: Path) -> RunLog:
    if not log_dir.is_dir():
        raise LaunchError(str(log_dir), "no such folder", "use the log folder of a run", code="launch.no-run")
    return read_run(log_dir)


def _write(out: Path, data: bytes) -> None:
    with system_errors(out, "cannot be written", code="output.unwritable"):
        write_file(out, data, is_durable=False)


def _page(title: str, parts: Sequence[str]) -> str:
    script = (files("runner.report") / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n<meta name="color-scheme" content="light dark">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}{_STYLE}</style>\n"
        + "\n".join(filter(None, parts))
        + f"\n<script>{script}</script>\n</html>\n"
    )


def _alarms(runs: dict[str, RunLog]) -> list[str]:
    """Return what went wrong: nothing for most runs."""
    broken = {
        name: [line["step"] for line in run.steps if not math.isfinite(line["loss"])] for name, run in runs.items()
    }
    return [
        f"<p class=alarm>{html.escape(name)}: the loss is not a finite number at step {steps[0]}"
        f"{f' and {len(steps) - 1} later' if steps[1:] else ''}</p>"
        for name, steps in broken.items()
        if steps
    ]


def tables_of(run: RunLog) -> tuple[str, ...]:
    """Return the tables of a run's page that need no trace."""
    return (_facts({"": run}), *_times(run), *_start(run), *_memory(run))


def _sentence(run: RunLog, plan: Timeline | None) -> str:
    """Return what is asked first: loss, throughput, bubble and MFU, as far as they were measured."""
    rates = [step["tokens_per_s"] for step in run.steps[1:] or run.steps]
    text = f"{len(run.steps)} steps, loss {run.steps[0]['loss']:.4f} to {run.steps[-1]['loss']:.4f}"
    text += f"; {median(rates):,.0f} tokens/s"
    timed = [step for step in run.steps if step.get("bubble_s")]
    if plan is not None and run.traces is not None:
        text += f"; bubble {run.traces.bubble:.1%} measured, {plan.bubble:.1%} planned"
    elif timed:
        text += f"; bubble {median(mean(step['bubble_s']) / (step['step_s'] or 1) for step in timed):.1%} of a step"
    utilizations = [step["mfu"] for step in run.steps if step.get("mfu") is not None]
    return text + (f"; MFU {median(utilizations):.1%}" if utilizations else "")


def _facts(runs: dict[str, RunLog]) -> str:
    """Return a table of what the runs are and did, a column for each."""
    facts = {name: {**_summary_of(run), **_identity_of(run)} for name, run in runs.items()}
    names = dict.fromkeys(fact for of_run in facts.values() for fact in of_run)
    rows = [(fact, *(of_run.get(fact, "") for of_run in facts.values())) for fact in names]
    return _table(("", *(facts if len(facts) > 1 else ("",))), rows, kind="facts")


def _identity_of(run: RunLog) -> dict[str, str]:
    """Return what a run is, from its record: nothing without one."""
    config = {name: str(value) for name, value in config_of(run.record).items()}
    versions = [f"{name.removeprefix('version/')} {config[name]}" for name in config if name.startswith("version/")]
    facts = {"run": ("name", "run"), "model": ("manifest",), "manifest digest": ("manifest_digest",)}
    facts |= {"command": ("command",), "host": ("host",), "ranks": ("num_ranks",)}
    texts = {fact: " ".join(config[name] for name in names if name in config) for fact, names in facts.items()}
    return {fact: text for fact, text in {**texts, "versions": ", ".join(versions)}.items() if text}


def _summary_of(run: RunLog) -> dict[str, str]:
    facts = {"steps": f"{run.steps[0]['step']} to {run.steps[-1]['step']}"}
    if run.begins[1:]:
        facts["attempts"] = f"{len(run.begins)}, from steps {', '.join(map(str, run.begins))}"
    if run.checkpoints:
        stall_s = median(line["stall_s"] for line in run.checkpoints)
        facts["checkpoints"] = f"{len(run.checkpoints)}; training paused for {stall_s * 1e3:.1f} ms, median"
    if run.evaluations:
        facts["evaluation loss, last"] = f"{run.evaluations[-1]['eval_loss']:.4f}"
    return facts


def _curves(runs: dict[str, RunLog]) -> list[str]:
    first = next(iter(runs.values()))

    def curves(field: str, what: str) -> list[Curve]:
        names = {name: f"{what} of {name}" if len(runs) > 1 else what for name in runs}
        return [
            Curve(
                name=names[name], points=[(line["step"], line[field]) for line in run.steps], is_other=run is not first
            )
            for name, run in runs.items()
        ]

    losses = curves("loss", "training loss") + [
        Curve(
            name=f"evaluation loss of {name}" if len(runs) > 1 else "evaluation loss",
            points=[(line["step"], line["eval_loss"]) for line in run.evaluations],
            is_other=run is not first,
            is_dotted=True,
        )
        for name, run in runs.items()
        if run.evaluations
    ]
    saved, attempts = sorted({line["step"] for line in first.checkpoints}), first.begins[1:]
    line = '<line class="{}" x1="0" x2="11" y1="5.5" y2="5.5" stroke-width="2"/>'
    circle = '<circle class="{}" cx="5.5" cy="5.5" r="4"/>'
    keys = [
        ((circle if curve.is_dotted else line).format("curve other" if curve.is_other else "curve own"), curve.name)
        for curve in losses
    ]
    of = f" of {next(iter(runs))}" if len(runs) > 1 else ""
    keys += [('<text class="saved" x="5.5" y="10">\N{BLACK UP-POINTING TRIANGLE}</text>', f"checkpoint{of}")] * bool(
        saved
    )
    keys += [('<line class="attempt" x1="5.5" x2="5.5" y2="11"/>', f"attempt{of} began, numbered")] * bool(attempts)
    return [
        "<h2>Loss</h2>", _keys(keys) if len(keys) > 1 else "",
        draw_curves("Loss by step", losses, attempts=attempts, saved=saved),
        "<h2>Throughput, in tokens/s</h2>",
        draw_curves("Throughput by step", curves("tokens_per_s", "tokens/s"), from_zero=True),
    ]  # fmt: skip


def _keys(entries: Sequence[tuple[str, str]]) -> str:
    """Return a legend: shapes of 11 pixels, and what they mean."""
    svg = '<span><svg width="11" height="11" aria-hidden="true">{}</svg> {}</span>'
    return f'<p class="legend">{" ".join(svg.format(shape, html.escape(text)) for shape, text in entries)}</p>'


def _times(run: RunLog) -> list[str]:
    """Return the step-time breakdown of each pipeline rank."""
    # Of a large schedule, most steps have no bubble.
    ranks = range(next((len(line["bubble_s"]) for line in reversed(run.steps) if line.get("bubble_s")), 0))
    if not ranks:
        return []
    # An earlier attempt may have had more ranks, or fewer. The first step is slower than others; its parts come first.
    lines = [line for line in run.steps if len(line.get("bubble_s", ())) == len(ranks)]
    is_first = lines[0] is run.steps[0] or not run.steps[0].get("bubble_s")
    lines = lines[1:] if is_first and len(lines) > 1 else lines
    rows = []
    for rank in ranks:
        parts = [median(line[f"{name}_s"][rank] for line in lines) for name in _PARTS]
        rows.append((f"{rank}", *(f"{seconds * 1e3:.1f}" for seconds in parts)))
    whole_s = median(line["step_s"] for line in lines)
    return [
        "<h2>Where the time of a step goes, in ms</h2>", _table(("pipeline rank", *_PARTS), rows),
        f"<p class=note>Medians over {len(lines)} step{'s' if len(lines) > 1 else ''}, until the gradients' norm is "
        f"known; a step with its optimizer takes {whole_s * 1e3:.1f} ms.</p>",
    ]  # fmt: skip


def _start(run: RunLog) -> list[str]:
    """Return the parts of each rank's start, in the last attempt."""
    loads = [load for load in run.loads if PARTS[0] in load]
    if not loads:
        return []
    rows = [(f"{load['rank']}", *(f"{load.get(part, 0):.2f}" for part in PARTS)) for load in loads]
    first = next(line for line in run.steps if line["step"] == run.begins[-1])
    notes = [
        "Launch: from runner launch until the rank has imported torch; fill: weights and optimizer state are read.",
        f"Data is opened and the first step taken in {first['time'] - loads[0]['time']:.2f} s more."
        if "time" in first and "time" in loads[0] and first["time"] >= loads[0]["time"]  # else it is loading
        else "",
    ]
    heads = ("rank", *(part.removesuffix("_s").replace("_", "-") for part in PARTS))
    return ["<h2>Start, in s</h2>", _table(heads, rows), f"<p class=note>{' '.join(notes).strip()}</p>"]


def _pipelines(traced: dict[str, tuple[Traces, Timeline | None]]) -> list[str]:
    """Draw a typical step of each run as it ran and as planned, if it has a plan; all have one time axis."""
    steps = {name: _typical(traces.steps) for name, (traces, _) in traced.items()}
    timelines = [timeline for name, (_, plan) in traced.items() for timeline in (steps[name].timeline, plan)]
    end_s = max((timeline.makespan_s for timeline in timelines if timeline is not None), default=0.0)
    pictures = [
        part
        for name, (traces, plan) in traced.items()
        for part in _pipeline(f" of {name}" if len(traced) > 1 else "", traces, steps[name], plan, end_s)
    ]
    note = (
        "<p class=note>Measured: the median of the traced steps, from the first action of any rank to the last; what "
        "is not computing is bubble."
    )
    if any(plan for _, plan in traced.values()):
        note += (
            " Planned, the thin rows: the schedule's actions, each with the median time measured for its stage, and "
            "transfers that cost nothing. The difference is communication, and actions that took longer than others."
        )
    return [*pictures, f"{note}</p>"] if pictures else []


def _pipeline(of: str, traces: Traces, step: StepTrace, plan: Timeline | None, end_s: float) -> list[str]:
    kinds = [kind for kind in WORK_COLORS if any(traces.seconds_of(kind))]
    rows = [
        (f"{stage}", f"{traces.ranks[traces.placement.rank_of(stage)]}",
         *(f"{traces.seconds_of(kind)[stage] * 1e3:.2f}" for kind in kinds))
        for stage in range(traces.placement.num_stages)
    ]  # fmt: skip
    title = f"Pipeline{of}: step {step.step} as it ran" + (f", and as {traces.schedule} plans it" if plan else "")
    timelines = {"ran": step.timeline, **({"planned": plan} if plan else {})}
    square = '<rect width="11" height="11" {}/>'
    colors = [(square.format(f'fill="{color}"'), text) for text, color in legend_of(kinds, traces.placement)]
    colors.append((square.format('class="wait"'), "waiting"))
    return [
        f"<h2>{html.escape(title)}</h2>",
        _keys(colors),
        pipeline_svg(title, timelines, traces.placement, end_s, traces.ranks),
        _table(
            ("", "measured", "planned"),
            [
                ("traced steps", f"{len(traces.steps)}", ""),
                ("bubble", f"{traces.bubble:.1%}", f"{plan.bubble:.1%}" if plan else ""),
                ("schedule, ms", f"{traces.seconds * 1e3:.1f}", f"{plan.makespan_s * 1e3:.1f}" if plan else ""),
            ],
        ),
        f"<h2>Time of one microbatch on each stage{html.escape(of)}, in ms</h2>",
        _table(("stage", "rank", *(WORK_COLORS[kind][0] for kind in kinds)), rows),
    ]


def _memory(run: RunLog) -> list[str]:
    """Compare each rank's memory with the plan; a run that was killed has the peak of rank 0 alone."""
    last = run.steps[-1]
    peaks = run.peaks_nbytes or ({0: last["peak_nbytes"]} if "peak_nbytes" in last else {})
    rows = []
    for load in run.loads:
        rank, base, planned = load["rank"], load.get("base_nbytes", 0), load.get("planned_nbytes")
        peak = peaks[rank] - base if rank in peaks else None
        shown = [_mib(base), _mib(peak), _mib(planned), f"{peak / planned:.2f}" if peak and planned else ""]
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


def _typical(steps: Sequence[StepTrace]) -> StepTrace:
    """Return the step with the median time."""
    return sorted(steps, key=lambda step: step.timeline.makespan_s)[len(steps) // 2]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    top = "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>" if any(head) else ""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table class="{kind}">{top}{body}</table></div>'
