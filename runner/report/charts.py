"""The pictures of a report as SVG: curves over steps, and the actions of each rank over time.

Places are in percent, so that text keeps its size on every screen; `page.js` adds reading by mouse and keyboard.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from manifests.command.palette import AMBER, BLUE, THEMES, WORK_COLORS, ink_on, tint
from manifests.placement import Placement
from manifests.schedules import Timeline
from runner.report.read import StepTrace, TracedAction

STYLE = f"""
:root {{ {THEMES["light"].css} --own: {BLUE}; --other: {AMBER}; }}
@media (prefers-color-scheme: dark) {{ :root {{ {THEMES["dark"].css} }} }}
svg text {{ font: 11px system-ui, sans-serif; fill: var(--quiet); pointer-events: none; }}
svg text.name {{ fill: var(--ink); font-weight: bold; }}
svg text.number {{ fill: currentColor; text-anchor: middle; }}
svg text.tick {{ paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }}
.grid {{ stroke: var(--faint); }} .mark {{ stroke: var(--quiet); stroke-dasharray: 2 3; }}
.reader {{ stroke: var(--ink); }} .wait {{ fill: var(--faint); }} .act {{ stroke: var(--paper); stroke-width: .5px; }}
.act.chosen {{ stroke: var(--ink); stroke-width: 2px; }}
.curve {{ fill: none; stroke-width: 1.8px; vector-effect: non-scaling-stroke; }}
.curve.own {{ stroke: var(--own); }} .curve.other {{ stroke: var(--other); }}
circle.own {{ fill: var(--own); }} circle.other {{ fill: var(--other); }}
"""

_MOST_POINTS = 2000  # of a curve
_PLOT = 144  # pixels: the height of curves
_LANE, _PLAN, _ROW = 22, 10, 62  # pixels: a rank's actions as they ran, as planned, and all with its name
_NAME = 16
_AXIS = 26
_TEXT_SHARE = 1.6  # percent of the width that a digit takes, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A value at each step; `is_other` marks that of the run compared with, `is_dotted` one without a line."""

    name: str
    points: Sequence[tuple[int, float]]
    is_other: bool = False
    is_dotted: bool = False


def draw_curves(title: str, curves: Sequence[Curve], *, lines: Iterable[int] = (), from_zero: bool = False) -> str:
    """Return curves over the steps, with upright lines at some of them. Values that are not finite leave a gap."""
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
    parts += [f'<line class="mark" x1="{x(at):.2f}%" x2="{x(at):.2f}%" y1="0" y2="100%"/>' for at in lines]
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
        parts.append(f'<text class="tick" x="2" y="{y(at):.2f}%" dy="-3">{at:,.6g}</text>')
    told = [
        f"{c.name}: {c.points[0][1]:.6g} at step {c.points[0][0]} to {c.points[-1][1]:.6g} at step {c.points[-1][0]}"
        for c in curves
        if c.points
    ]
    values = {c.name: [[s, v] for s, v in c.points if math.isfinite(v)] for c in shown}
    data = escape(json.dumps({"first": first, "last": last, "values": values}), quote=True)
    labels = "".join(
        f'<text class="tick" x="{x(at):.2f}%" y="{_PLOT + 32}" text-anchor="{_anchor(x(at))}">{at:g}</text>'
        for at in ticks(first, last, 8)
        if float(at).is_integer()
    )
    return (
        f'<svg class="chart" role="img" tabindex="0" width="100%" height="{_PLOT + 40}" data-curves="{data}">'
        f"<title>{escape(title)}</title><desc>{escape('; '.join(told))}</desc>"
        f'<svg class="plot" width="100%" y="14" height="{_PLOT}" overflow="visible">{"".join(parts)}</svg>'
        f"{labels}</svg>"
    )


def draw_pipeline(
    title: str, step: StepTrace, plan: Sequence[Sequence[TracedAction]], placement: Placement, end_s: float
) -> str:
    """Return a row per rank: its actions as they ran, and under them as the schedule plans them, on one time axis."""
    rows = []
    for rank, (ran, planned) in enumerate(zip(step.ranks, plan, strict=True)):
        top = rank * _ROW
        rows.append(f'<text class="name" x="2" y="{top + _NAME - 4}">rank {rank}</text>')
        rows.append(f'<rect class="wait" x="0" width="100%" y="{top + _NAME}" height="{_LANE + _PLAN + 2}"/>')
        for actions, y, height, how in (
            (ran, top + _NAME, _LANE, "ran"),
            (planned, top + _NAME + _LANE + 2, _PLAN, "planned"),
        ):
            rows += [_box(action, rank, placement, (y, height, how), end_s) for action in actions]
    height = len(step.ranks) * _ROW + _AXIS
    axis = [
        f'<text class="tick time" x="{_share(at / 1e3, end_s)}" y="{height - 8}" '
        f'text-anchor="{_anchor(100 * at / 1e3 / end_s)}">{at:g} ms</text>'
        for at in ticks(0, end_s * 1e3, 8)
    ]
    told = f"{len(step.ranks)} ranks, {end_s * 1e3:.1f} ms; each rank's actions as they ran, below them as planned"
    return (
        f'<svg class="pipeline" role="img" tabindex="0" width="100%" height="{height}" data-end="{end_s:.9f}">'
        f"<title>{escape(title)}</title><desc>{escape(told)}</desc>{''.join(rows)}{''.join(axis)}</svg>"
    )


def standalone(picture: str, width: int) -> str:
    """Return a picture of a page as a file of its own, of this width in pixels."""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" style="background: var(--paper)" width="{width}"'
    picture = picture.replace("<svg", opening, 1).replace(' width="100%"', "", 1).replace(' tabindex="0"', "", 1)
    return picture.replace("</desc>", f"</desc><style>{STYLE}</style>", 1) + "\n"


def actions_of_plan(plan: Timeline) -> list[list[TracedAction]]:
    """Return the actions of a simulated schedule as if they had been traced."""
    return [
        [
            TracedAction(
                kind=span.action.kind, stage=span.action.stage, microbatch=span.action.microbatch,
                begin_s=span.start_s, end_s=span.end_s,
            )
            for span in spans
        ]
        for spans in plan.ranks
    ]  # fmt: skip


def legend(kinds: Iterable[str]) -> str:
    """Return what the colors of actions mean."""
    keys = [(WORK_COLORS[kind][1], WORK_COLORS[kind][0]) for kind in kinds]
    square = '<svg width="11" height="11" aria-hidden="true"><rect width="11" height="11"{}/></svg> {}'
    squares = [square.format(f' fill="{color}"', name) for color, name in keys]
    waiting = square.format(' class="wait"', "waiting")
    return f'<p class="legend">{" &nbsp; ".join([*squares, waiting])}</p>'


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers between two others, at most about `most` of them."""
    rough = (high - low) / most
    if not rough > 0:
        return [low]
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _box(action: TracedAction, rank: int, placement: Placement, lane: tuple[int, int, str], end_s: float) -> str:
    """Return an action's box with what it says when pointed at, and its microbatch if there may be room."""
    y, height, how = lane
    color = WORK_COLORS[action.kind][1]
    if placement.num_virtual > 1:
        color = tint(color, 0.6 * placement.virtual_of(action.stage) / (placement.num_virtual - 1))
    seconds = action.end_s - action.begin_s
    tip = (
        f"rank {rank}, stage {action.stage}: {WORK_COLORS[action.kind][0]}, microbatch {action.microbatch}, "
        f"{how}: {seconds * 1e3:.2f} ms from {action.begin_s * 1e3:.2f} ms"
    )
    place = f'x="{_share(action.begin_s, end_s)}" width="{_share(seconds, end_s)}"'
    box = (
        f'<rect class="act" {place} y="{y}" height="{height}" fill="{color}" data-rank="{rank}" '
        f'data-b="{action.begin_s:.9f}" data-e="{action.end_s:.9f}"><title>{tip}</title></rect>'
    )
    label = str(action.microbatch)
    if how == "planned" or action.kind == "L":
        return box
    middle_s = (action.begin_s + action.end_s) / 2
    is_narrow = 100 * seconds / end_s < _TEXT_SHARE * len(label)
    hidden = ' visibility="hidden"' if is_narrow else ""
    return (
        f'{box}<text class="number" x="{_share(middle_s, end_s)}" y="{y + height / 2 + 4:g}" '
        f'style="color: {ink_on(color)}"{hidden}>{label}</text>'
    )


def _share(seconds: float, end_s: float) -> str:
    return f"{100 * seconds / end_s:.4f}%" if end_s else "0%"


def _anchor(percent: float) -> str:
    return "start" if percent < 2 else "end" if percent > 96 else "middle"


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
    each = -(-len(points) // _MOST_POINTS)
    return points if each <= 1 else [*points[:-1:each], points[-1]]
