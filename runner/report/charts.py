"""Curves over the steps of a run, and the load of experts as a heat map, as SVG.

Places are in percent, so that text keeps its size on every screen; `page.js` adds reading by mouse and keyboard.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from manifests.command.palette import PURPLE
from manifests.schedules.picture import STYLE as PIPELINE_STYLE
from manifests.schedules.picture import text_anchor, ticks
from runner.report.read import Line

STYLE = f"""{PIPELINE_STYLE}
:root {{ --own: var(--ink); --other: {PURPLE}; }}
.grid {{ stroke: var(--faint); }} .attempt {{ stroke: var(--quiet); stroke-dasharray: 4 3; }}
svg text.level {{ text-anchor: end; }} svg text.saved {{ text-anchor: middle; }}
.reader {{ stroke: var(--ink); }}
.curve {{ fill: none; stroke-width: 1.8px; vector-effect: non-scaling-stroke; }}
.curve.own {{ stroke: var(--own); }} .curve.other {{ stroke: var(--other); }}
circle {{ fill: var(--paper); stroke-width: 1.8px; }} circle.own {{ stroke: var(--own); }}
circle.other {{ stroke: var(--other); }}
"""

_MOST_POINTS = 2000  # of a curve
_PLOT = 144  # pixels: the height of curves


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A value at each step; `is_other` marks that of the run compared with, `is_dotted` one without a line."""

    name: str
    points: Sequence[tuple[int, float]]
    is_other: bool
    is_dotted: bool = False


def draw_curves(
    title: str,
    curves: Sequence[Curve],
    *,
    attempts: Iterable[int] = (),
    saved: Iterable[int] = (),
    from_zero: bool = False,
) -> str:
    """Return curves over the steps, with a line where each later attempt began, and a triangle for each checkpoint.

    Values that are not finite leave a gap.
    """
    finite = [value for curve in curves for _, value in curve.points if math.isfinite(value)]
    steps = [step for curve in curves for step, _ in curve.points]
    if not finite:
        return ""
    low, high = (0.0 if from_zero else min(finite)), max(finite)
    spare = (high - low or abs(high) or 1.0) * 0.06
    low, high = (low if from_zero else low - spare), high + 2.5 * spare
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return 100 * (step - first) / (last - first)

    def y(value: float) -> float:
        return 100 * (high - value) / (high - low)

    parts = []
    for at in ticks(low, high, 4):
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y(at):.2f}%" y2="{y(at):.2f}%"/>')
    parts += [
        f'<line class="attempt" x1="{x(at):.2f}%" x2="{x(at):.2f}%" y1="0" y2="100%"/>'
        f'<text class="tick" x="{x(at):.2f}%" y="8" dx="3">{number}</text>'
        for number, at in enumerate(attempts, 2)
    ]
    parts += [f'<text class="saved" x="{x(at):.2f}%" y="100%">\N{BLACK UP-POINTING TRIANGLE}</text>' for at in saved]
    shown = [Curve(name=c.name, points=_thin(c.points), is_other=c.is_other, is_dotted=c.is_dotted) for c in curves]
    for curve in shown:
        kind = "other" if curve.is_other else "own"
        if curve.is_dotted:
            points = [(step, value) for step, value in curve.points if math.isfinite(value)]
            parts += [f'<circle class="{kind}" cx="{x(s):.2f}%" cy="{y(v):.2f}%" r="4"/>' for s, v in points]
        else:
            path = _path([(x(step), y(value)) for step, value in curve.points])
            parts.append(
                '<svg viewBox="0 0 100 100" preserveAspectRatio="none" width="100%" height="100%" overflow="visible">'
                f'<path class="curve {kind}" d="{path}"/></svg>'
            )
    for at in ticks(low, high, 4):
        parts.append(f'<text class="level" x="-6" y="{y(at):.2f}%" dy="4">{at:,.6g}</text>')
    ranges = [
        f"{c.name}: {c.points[0][1]:.6g} at step {c.points[0][0]} to {c.points[-1][1]:.6g} at step {c.points[-1][0]}"
        for c in curves
        if c.points
    ]
    values = {c.name: [[s, v] for s, v in c.points if math.isfinite(v)] for c in shown}
    data = escape(json.dumps({"first": first, "last": last, "values": values}), quote=True)
    labels = "".join(
        f'<text class="tick" x="{x(at):.2f}%" y="{_PLOT + 32}" text-anchor="{text_anchor(x(at))}">{word}{at:g}</text>'
        for word, at in number_axis("step", ticks(first, last, 8))
    )
    return (
        f'<svg class="chart" role="img" tabindex="0" width="100%" height="{_PLOT + 40}" data-curves="{data}">'
        f"<title>{escape(title)}</title><desc>{escape('; '.join(ranges))}</desc>"
        f'<svg class="plot" width="100%" y="14" height="{_PLOT}" overflow="visible">{"".join(parts)}</svg>'
        f"{labels}</svg>"
    )


def number_axis(name: str, numbers: Iterable[float]) -> list[tuple[str, float]]:
    """Return the whole numbers of an axis, each after what precedes it: the name, before the first."""
    whole = (number for number in numbers if float(number).is_integer())
    return [("" if place else f"{name} ", number) for place, number in enumerate(whole)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return a line through points, interrupted where there is none."""
    parts, command = [], "M"
    for x, y in points:
        if math.isfinite(y):
            parts.append(f"{command}{x:.2f} {y:.2f}")
            command = "L"
        else:
            command = "M"
    return " ".join(parts)


def _thin(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Return every nth point, and the last."""
    interval = -(-len(points) // _MOST_POINTS)
    return points if interval <= 1 else [*points[:-1:interval], points[-1]]


_ROW = 14  # pixels
_FULL = 2.0  # times the mean: the load that is drawn black, or white on a dark page


def draw_load(lines: Sequence[Line]) -> list[str]:
    """Return a picture of the load over the last tenth of the recorded steps; nothing if none was recorded."""
    recorded = [line for line in lines if line.get("expert_load")]
    recorded = recorded[-max(1, len(recorded) // 10) :]
    sums = defaultdict[int, list[int]](list)
    for line in recorded:
        for layer, counts in line["expert_load"].items():
            before = sums[int(layer)]
            sums[int(layer)] = [a + b for a, b in zip(before or [0] * len(counts), counts, strict=False)]
    loads = {layer: counts for layer, counts in sorted(sums.items()) if sum(counts)}
    if not loads:
        return []
    widest, parts, height = max(map(len, loads.values())), [], len(loads) * _ROW
    for row, ((name, layer), counts) in enumerate(zip(number_axis("layer", [*loads]), loads.values(), strict=True)):
        y, mean = row * _ROW, sum(counts) / len(counts)
        parts.append(f'<text class="level" x="-6" y="{y + _ROW - 3}">{name}{layer}</text>')
        edges = [100 * expert / widest for expert in range(len(counts) + 1)]
        for expert, ((begin, end), count) in enumerate(zip(pairwise(edges), counts, strict=True)):
            share = count / mean
            parts.append(
                f'<rect class="load" x="{begin:.2f}%" y="{y}" width="{end - begin:.2f}%" height="{_ROW}" '
                f'fill-opacity="{min(1.0, share / _FULL):.2f}">'
                f"<title>layer {layer}, expert {expert}: {share:.2f} of the mean</title></rect>"
            )
    for name, at in number_axis("expert", ticks(0, widest - 1, 8)):
        x = 100 * (at + 0.5) / widest
        parts.append(f'<text x="{x:.2f}%" y="{height + _ROW}" text-anchor="{text_anchor(x)}">{name}{at:g}</text>')
    first, last = recorded[0]["step"], recorded[-1]["step"]
    worst = max(loads, key=lambda layer: max(loads[layer]) / sum(loads[layer]) * len(loads[layer]))
    most = max(loads[worst]) / sum(loads[worst]) * len(loads[worst])
    title = f"Load of experts by layer, steps {first} to {last}"
    return [
        "<h2>Load of experts</h2>",
        f'<svg class="heat" role="img" width="100%" height="{height + _ROW + 4}"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg>",
        f"<p class=note>Tokens of each expert over the recorded steps {first} to {last}, relative to the mean of its "
        f"layer: none is blank, twice the mean has the full contrast. The largest is {most:.2f} of the mean, in layer "
        f"{worst}.</p>",
    ]
