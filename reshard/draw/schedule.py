"""One step of the schedule: what each rank computes when, one row per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from manifests.palette import WORK_COLORS, Theme, ink_on, tint
from reshard.draw.phases import Box, View, view_of
from reshard.draw.ranks import number_rows, put_legend, row_height
from reshard.draw.scale import Scale, height_of, second_scale, width_of
from reshard.draw.theme import SMALLEST_PT
from reshard.estimate.training_estimate import Forecast

__all__ = ["draw_schedule"]

_MOST_BOXES = 6000  # with more actions, rows of pixels are drawn
_NUM_PIXELS = 1000  # of a row
_DIGIT_PT = 0.64 * SMALLEST_PT
_TICK_PT = 45  # between two numbers of the axis, at least


def draw_schedule(axes: Axes, forecast: Forecast, theme: Theme) -> None:
    """Draw every action, or of a long step its beginning and its end; blanks are waiting."""
    num_ranks, time = forecast.placement.num_ranks, _time_scale(forecast)
    view = view_of(forecast.timeline, forecast.num_microbatches, _readable_s(forecast, width_of(axes)))
    boxes = list(view.boxes(forecast.timeline))
    axes.barh(range(num_ranks), view.width_s or 1.0, height=row_height(num_ranks), color=theme.faint, linewidth=0)
    axes.set_xlim(0, view.width_s or 1.0)
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
    groups: dict[str, list[Box]] = {}
    for box in boxes:
        groups.setdefault(_color(forecast, box), []).append(box)
    point = axes.get_xlim()[1] / width_of(axes)
    for color, members in groups.items():
        shortest_pt = min(box.right - box.left for box in members) / point
        path = _outline(members, row_height(forecast.placement.num_ranks))
        axes.add_patch(PathPatch(path, facecolor=color, edgecolor=theme.paper, linewidth=min(0.4, shortest_pt / 12)))


def _outline(members: Iterable[Box], height: float) -> Path:
    corners, codes = [], []
    for box in members:
        left, right = box.left, box.right
        low, high = box.rank - height / 2, box.rank + height / 2
        corners += [(left, low), (right, low), (right, high), (left, high), (left, low)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(corners, codes)


def _draw_pixels(axes: Axes, forecast: Forecast, boxes: Iterable[Box], width_s: float, theme: Theme) -> None:
    """Draw each rank as a row of pixels: the mean color of the actions in each, transparent where it waits."""
    num_ranks, per_pixel = forecast.placement.num_ranks, width_s / _NUM_PIXELS
    colors: dict[tuple[str, int], tuple[float, float, float]] = {}
    sums = [[[0.0, 0.0, 0.0, 0.0] for _ in range(_NUM_PIXELS)] for _ in range(num_ranks)]
    for box in boxes:
        key = box.action.kind, box.action.stage
        if key not in colors:
            colors[key] = to_rgb(_color(forecast, box))
        red, green, blue = colors[key]
        start, end, row = box.left / per_pixel, box.right / per_pixel, sums[box.rank]
        first, last = int(start), min(int(end), _NUM_PIXELS - 1)
        for pixel in range(first, last + 1):
            weight = (end if pixel == last else pixel + 1) - (start if pixel == first else pixel)
            cell = row[pixel]
            cell[0] += weight * red
            cell[1] += weight * green
            cell[2] += weight * blue
            cell[3] += weight
    rows = [[_mean(*cell) for cell in row] for row in sums]
    axes.imshow(rows, extent=(0, width_s, num_ranks - 0.5, -0.5), aspect="auto", interpolation="none", zorder=2)
    axes.set_xlim(0, width_s)
    gap_pt = (1 - row_height(num_ranks)) * height_of(axes) / num_ranks
    if gap_pt:
        bounds = [rank - 0.5 for rank in range(num_ranks + 1)]
        axes.hlines(bounds, 0, width_s, color=theme.paper, linewidth=gap_pt, zorder=3)


def _mean(red: float, green: float, blue: float, weight: float) -> tuple[float, float, float, float]:
    if not weight:
        return 0.0, 0.0, 0.0, 0.0
    return min(1.0, red / weight), min(1.0, green / weight), min(1.0, blue / weight), min(1.0, weight)


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
