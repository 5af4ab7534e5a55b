"""One step of the schedule: what each rank computes when, one row per rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from manifests.command.palette import WORK_COLORS, Theme, ink_on, tint
from manifests.schedules import Action, Timeline
from reshard.draw.ranks import number_rows, put_legend, row_edges, row_height
from reshard.draw.scale import Scale, draw_bars, height_of, second_scale, width_of
from reshard.draw.theme import SMALLEST_PT
from reshard.estimate.training_estimate import Forecast

_MOST_BOXES = 6000  # with more actions, rows of pixels are drawn
_NUM_PIXELS = 1000  # of a row
_LEAST_FILLED = 1e-6  # of a pixel
_DIGIT_PT = 0.64 * SMALLEST_PT
_TICK_PT = 45  # between two numbers of the axis, at least


def draw_schedule(axes: Axes, forecast: Forecast, theme: Theme) -> None:
    """Draw every action, or of a long step its beginning and its end; blanks are waiting."""
    num_ranks, time = forecast.placement.num_ranks, _time_scale(forecast)
    view = view_of(forecast.timeline, forecast.num_microbatches, _readable_s(forecast, width_of(axes)))
    boxes = list(view.boxes(forecast.timeline))
    width_s = view.width_s or 1.0
    draw_bars(
        axes, ((0.0, width_s, *row_edges(rank, num_ranks)) for rank in range(num_ranks)), theme.faint, linewidth=0
    )
    axes.set_xlim(0, width_s)
    mixed = len(boxes) > _MOST_BOXES
    if mixed:
        _draw_pixels(axes, forecast, boxes, view.width_s, theme)
    else:
        _draw_boxes(axes, forecast, boxes, theme)
        _number_microbatches(axes, forecast, boxes)
    number_rows(axes, forecast, theme)
    _number_times(axes, view, time)
    title = f"Schedule: {forecast.schedule}, {forecast.num_microbatches} microbatches"
    axes.set_title(title, pad=20 if view.num_cut else 6)
    if view.num_cut:
        _mark_cut(axes, view, theme)
    handles = _legend(forecast, boxes, theme, mixed=mixed)
    put_legend(axes, handles, ncols=len(handles) if len(handles) <= 4 else 3)


def _readable_s(forecast: Forecast, width_pt: float) -> float:
    """Return for how many seconds there is room, with forwards half as wide as the number of a microbatch."""
    digits = len(str(forecast.num_microbatches - 1))
    mean = sum(time.forward for time in forecast.times) / len(forecast.times)
    return 2 * mean * width_pt / (_DIGIT_PT * digits + 2)


def _time_scale(forecast: Forecast) -> Scale:
    """Return a scale in seconds if times were measured, else in mean forward passes of a stage."""
    if forecast.assumed.measured:
        scale = second_scale(forecast.timeline.makespan_s)
        return Scale(name=f"time, {scale.name}", unit=scale.unit)
    mean = sum(time.forward for time in forecast.times) / len(forecast.times)
    return Scale(name="time, in mean forward passes of a stage", unit=mean or 1.0)


def _number_times(axes: Axes, view: View, time: Scale) -> None:
    """Number the axis by the time of the step, on both sides of a cut."""
    most = max(2, int(width_of(axes) / _TICK_PT))
    # The shown time as if it were one piece: its step is right for both.
    ticks = MaxNLocator(nbins=most, integer=True).tick_values(0, (view.width_s or 1.0) / time.unit)
    step = float(ticks[1] - ticks[0])
    spare_s = _TICK_PT / 2 * view.width_s / width_of(axes) if view.num_cut else 0.0
    times = [tick * step for tick in range(int(view.end_s / time.unit / step) + 1)]
    shown = [t for t in times if t * time.unit <= view.head_s - spare_s or t * time.unit >= view.tail_s + spare_s]
    axes.set_xticks([view.place(t * time.unit) for t in shown], [f"{t:g}" for t in shown])
    axes.set_xlabel(time.name)


def _mark_cut(axes: Axes, view: View, theme: Theme) -> None:
    """Blank the gap, and name the phases above the rows."""
    left, right = view.head_s, view.head_s + view.gap_s
    axes.axvspan(left, right, color=theme.paper, linewidth=0, zorder=4)
    for edge in (left, right):
        axes.axvline(edge, color=theme.quiet, linewidth=0.8, linestyle=(0, (2, 2)), zorder=5)
    middle = f"steady state, {view.num_cut} microbatches cut"
    names = (0.0, "warm-up", "left"), ((left + right) / 2, middle, "center"), (view.width_s, "drain", "right")
    for place, text, side in names:
        axes.annotate(
            text, (place, 1), (0, 4), xycoords=axes.get_xaxis_transform(), textcoords="offset points", ha=side,
            va="bottom", fontsize=SMALLEST_PT, color=theme.quiet,
        )  # fmt: skip


def _legend(forecast: Forecast, boxes: Sequence[Box], theme: Theme, *, mixed: bool) -> list[Patch]:
    kinds = {box.action.kind for box in boxes}
    handles = [Patch(color=color, label=name) for kind, (name, color) in WORK_COLORS.items() if kind in kinds]
    handles.append(Patch(color=theme.faint, label=f"waiting, {forecast.timeline.bubble:.1%} of the time"))
    if forecast.placement.num_virtual > 1:
        handles.append(Patch(color="none", label="paler: later virtual stages"))
    if mixed:
        handles.append(Patch(color="none", label="mixed: too short to tell apart"))
    return handles


def _color(forecast: Forecast, box: Box) -> str:
    """Return the color of an action, paler for the later stages of its rank."""
    placement = forecast.placement
    color = WORK_COLORS[box.action.kind][1]
    if placement.num_virtual == 1:
        return color
    return tint(color, 0.6 * placement.virtual_of(box.action.stage) / (placement.num_virtual - 1))


def _draw_boxes(axes: Axes, forecast: Forecast, boxes: Iterable[Box], theme: Theme) -> None:
    """Draw a box per action: one path for all of a color, to keep the file small."""
    point, num_ranks = axes.get_xlim()[1] / width_of(axes), forecast.placement.num_ranks
    for color, members in _by_color(forecast, boxes).items():
        shortest_pt = min(box.right - box.left for box in members) / point
        bars = ((box.left, box.right, *row_edges(box.rank, num_ranks)) for box in members)
        draw_bars(axes, bars, color, edgecolor=theme.paper, linewidth=min(0.4, shortest_pt / 12))


def _by_color(forecast: Forecast, boxes: Iterable[Box]) -> dict[str, list[Box]]:
    colors: dict[tuple[str, int], str] = {}
    groups: dict[str, list[Box]] = {}
    for box in boxes:
        key = box.action.kind, box.action.stage
        if key not in colors:
            colors[key] = _color(forecast, box)
        groups.setdefault(colors[key], []).append(box)
    return groups


def _draw_pixels(axes: Axes, forecast: Forecast, boxes: Iterable[Box], width_s: float, theme: Theme) -> None:
    """Draw each rank as a row of pixels: the mean color of the actions in each, transparent where it waits."""
    num_ranks = forecast.placement.num_ranks
    filled = np.zeros((num_ranks, _NUM_PIXELS))
    colored = np.zeros((num_ranks, _NUM_PIXELS, 3))
    for color, members in _by_color(forecast, boxes).items():
        covered = _covered(members, num_ranks, width_s / _NUM_PIXELS)
        filled += covered
        colored += covered[..., None] * np.array(to_rgb(color))
    filled[filled < _LEAST_FILLED] = 0
    rows = np.dstack((colored / np.maximum(filled, _LEAST_FILLED)[..., None], filled)).clip(0, 1)
    axes.imshow(rows, extent=(0, width_s, num_ranks - 0.5, -0.5), aspect="auto", interpolation="none", zorder=2)
    axes.set_xlim(0, width_s)
    gap_pt = (1 - row_height(num_ranks)) * height_of(axes) / num_ranks
    if gap_pt:
        bounds = [rank - 0.5 for rank in range(num_ranks + 1)]
        axes.hlines(bounds, 0, width_s, color=theme.paper, linewidth=gap_pt, zorder=3)


def _covered(boxes: Sequence[Box], num_ranks: int, per_pixel: float) -> NDArray[np.float64]:
    """Return which part of each pixel boxes that do not overlap cover, by rank: what is left of their right edges, but
    not of their left ones."""
    ranks = np.array([box.rank for box in boxes])

    def left_of(edges: list[float]) -> NDArray[np.float64]:
        places = np.array(edges) / per_pixel
        pixels = np.minimum(places.astype(int), _NUM_PIXELS - 1)
        cells, shape = ranks * _NUM_PIXELS + pixels, (num_ranks, _NUM_PIXELS)
        ending = np.bincount(cells, minlength=num_ranks * _NUM_PIXELS).reshape(shape)
        parts = np.bincount(cells, places - pixels, minlength=num_ranks * _NUM_PIXELS).reshape(shape)
        until: NDArray[np.float64] = parts + ending[:, ::-1].cumsum(1)[:, ::-1] - ending
        return until

    return left_of([box.right for box in boxes]) - left_of([box.left for box in boxes])


def _number_microbatches(axes: Axes, forecast: Forecast, boxes: Iterable[Box]) -> None:
    """Write the microbatch into each box with room for it."""
    if height_of(axes) / forecast.placement.num_ranks < 1.3 * SMALLEST_PT:
        return
    point = axes.get_xlim()[1] / width_of(axes)
    for box in boxes:
        label = str(box.action.microbatch)
        if (box.right - box.left) / point >= _DIGIT_PT * len(label) + 2:
            axes.text(
                (box.left + box.right) / 2, box.rank, label, ha="center", va="center_baseline", fontsize=SMALLEST_PT,
                color=ink_on(_color(forecast, box)),
            )  # fmt: skip


_KEPT = 2  # microbatches of the steady state on either side of the cut
_LEAST_CUT = 4  # microbatches
_GAP = 0.03  # of what is drawn
_START, _END = attrgetter("start_s"), attrgetter("end_s")


class Box(NamedTuple):
    """An action of a rank, or the part of it that is drawn, in seconds from the left edge."""

    rank: int
    action: Action
    left: float
    right: float


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The seconds of a step that are drawn: those up to `head_s` and those from `tail_s`, `gap_s` apart."""

    head_s: float
    tail_s: float
    end_s: float
    gap_s: float = 0.0
    num_cut: int = 0  # microbatches

    @property
    def width_s(self) -> float:
        return self.head_s + self.gap_s + self.end_s - self.tail_s

    def place(self, time_s: float) -> float:
        """Return where a time is drawn; what is cut is drawn in the gap."""
        if time_s <= self.head_s:
            return time_s
        return max(self.head_s, time_s - self.tail_s + self.head_s + self.gap_s)

    def boxes(self, timeline: Timeline) -> Iterator[Box]:
        """Yield what is drawn of every action, rank by rank."""
        shift_s = self.head_s + self.gap_s - self.tail_s
        for rank, spans in enumerate(timeline.ranks):
            for action, start_s, end_s in spans[: bisect_left(spans, self.head_s, key=_START)]:
                if start_s < end_s:
                    yield Box(rank, action, start_s, min(end_s, self.head_s))
            for action, start_s, end_s in spans[bisect_right(spans, self.tail_s, key=_END) :]:
                if start_s < end_s:
                    yield Box(rank, action, max(start_s, self.tail_s) + shift_s, end_s + shift_s)


def view_of(timeline: Timeline, num_microbatches: int, most_s: float) -> View:
    """Return the whole step if it takes at most `most_s`; of a longer one, cut the steady state, if it has one."""
    end_s = timeline.makespan_s
    whole = View(head_s=end_s, tail_s=end_s, end_s=end_s)
    backwards = [next((span for span in spans if span.action.kind != "F"), None) for spans in timeline.ranks]
    forwards = [next((span for span in reversed(spans) if span.action.kind == "F"), None) for spans in timeline.ranks]
    starts_s = [first.start_s for first in backwards if first]
    ends_s = [last.end_s for last in forwards if last]
    if end_s <= most_s or len(starts_s) < len(backwards) or len(ends_s) < len(forwards):
        return whole
    each_s = max(timeline.busy_s) / num_microbatches
    # In between, every rank runs forwards and backwards.
    head_s, tail_s = max(starts_s) + _KEPT * each_s, min(ends_s) - _KEPT * each_s
    if tail_s - head_s < _LEAST_CUT * each_s:
        return whole
    shown_s = head_s + end_s - tail_s
    num_cut = round((tail_s - head_s) / each_s)
    return View(head_s=head_s, tail_s=tail_s, end_s=end_s, gap_s=_GAP * shown_s, num_cut=num_cut)
