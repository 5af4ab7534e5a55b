"""One step of the schedule: what each rank computes when, one row per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from manifests.schedules import TimedAction
from reshard.draw.ranks import number_rows, put_legend, row_height
from reshard.draw.scale import Scale, height_of, second_scale, width_of
from reshard.draw.theme import ON_DARK, ON_LIGHT, WORK_COLORS, Theme
from reshard.estimate.training_estimate import Forecast

__all__ = ["draw_schedule"]

_MOST_BOXES = 6000  # with more actions, rows of pixels are drawn
_NUM_PIXELS = 1500  # of a row
_CHAR_PT = 4.6
_LEAST_ROW_PT = 10

RankAction = tuple[int, TimedAction]  # rank and action


def draw_schedule(axes: Axes, forecast: Forecast, theme: Theme) -> None:
    """Draw every action; blanks are waiting."""
    placement, num_ranks = forecast.placement, forecast.placement.num_ranks
    time = _time_scale(forecast)
    end = forecast.timeline.makespan_s / time.unit or 1.0
    axes.barh(range(num_ranks), end, height=row_height(num_ranks), color=theme.faint, linewidth=0)
    spans = [(rank, span) for rank, row in enumerate(forecast.timeline.ranks) for span in row]
    spans = [(rank, span) for rank, span in spans if span.end_s > span.start_s]
    mixed = len(spans) > _MOST_BOXES
    if mixed:
        _draw_pixels(axes, forecast, end, theme)
    else:
        _draw_boxes(axes, forecast, spans, time, theme)
        _number_microbatches(axes, forecast, spans, time, theme)
    axes.set(xlim=(0, end), xlabel=time.name)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    number_rows(axes, forecast)
    axes.set_title(f"Schedule: {forecast.schedule}, {forecast.num_microbatches} microbatches")
    kinds = {span.action.kind for _, span in spans}
    handles = [Patch(color=color, label=name) for kind, (name, color) in WORK_COLORS.items() if kind in kinds]
    handles.append(Patch(color=theme.faint, label=f"waiting, {forecast.timeline.bubble:.1%} of the time"))
    if placement.num_virtual > 1:
        handles.append(Patch(color="none", label="fainter: later virtual stages"))
    if mixed:
        handles.append(Patch(color="none", label="mixed: too short to tell apart"))
    put_legend(axes, handles, ncols=len(handles) if len(handles) <= 5 else 3)


def _time_scale(forecast: Forecast) -> Scale:
    """Return a scale in seconds if times were measured, else in mean forward passes of a stage."""
    if forecast.assumed.measured:
        scale = second_scale(forecast.timeline.makespan_s)
        return Scale(name=f"time, {scale.name}", unit=scale.unit)
    mean = sum(time.forward for time in forecast.times) / len(forecast.times)
    return Scale(name="time, in mean forward passes of a stage", unit=mean or 1.0)


def _draw_boxes(axes: Axes, forecast: Forecast, spans: Sequence[RankAction], time: Scale, theme: Theme) -> None:
    """Draw a box per action: one path for all of a kind and virtual stage, to keep the file small."""
    groups: dict[tuple[str, int], list[RankAction]] = {}
    for rank, span in spans:
        groups.setdefault((span.action.kind, forecast.placement.virtual_of(span.action.stage)), []).append((rank, span))
    point = forecast.timeline.makespan_s / width_of(axes)
    for (kind, virtual), members in sorted(groups.items()):
        shortest_pt = min(span.end_s - span.start_s for _, span in members) / point
        axes.add_patch(
            PathPatch(
                _boxes(members, time, row_height(forecast.placement.num_ranks)),
                facecolor=WORK_COLORS[kind][1],
                edgecolor=theme.paper,
                linewidth=min(0.4, shortest_pt / 12),
                alpha=_shade(virtual, forecast.placement.num_virtual),
            )
        )


def _boxes(members: Iterable[RankAction], time: Scale, height: float) -> Path:
    corners, codes = [], []
    for rank, span in members:
        left, right = span.start_s / time.unit, span.end_s / time.unit
        low, high = rank - height / 2, rank + height / 2
        corners += [(left, low), (right, low), (right, high), (left, high), (left, low)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(corners, codes)


def _draw_pixels(axes: Axes, forecast: Forecast, right: float, theme: Theme) -> None:
    """Draw each rank as a row of pixels: the mean color of the actions in each, transparent where it waits."""
    placement, timeline = forecast.placement, forecast.timeline
    colors = {kind: to_rgb(color) for kind, (_, color) in WORK_COLORS.items()}
    per_pixel = timeline.makespan_s / _NUM_PIXELS
    rows = []
    for spans in timeline.ranks:
        sums = [[0.0, 0.0, 0.0, 0.0] for _ in range(_NUM_PIXELS)]
        for span in spans:
            shade = _shade(placement.virtual_of(span.action.stage), placement.num_virtual)
            red, green, blue = colors[span.action.kind]
            start, end = span.start_s / per_pixel, span.end_s / per_pixel
            for pixel in range(int(start), min(int(end) + 1, _NUM_PIXELS)):
                weight = shade * max(0.0, min(end, pixel + 1) - max(start, pixel))
                cell = sums[pixel]
                cell[0] += weight * red
                cell[1] += weight * green
                cell[2] += weight * blue
                cell[3] += weight
        rows.append([_mean(*cell) for cell in sums])
    num_ranks = placement.num_ranks
    axes.imshow(rows, extent=(0, right, num_ranks - 0.5, -0.5), aspect="auto", interpolation="none", zorder=2)
    gap_pt = (1 - row_height(num_ranks)) * height_of(axes) / num_ranks
    if gap_pt:
        bounds = [rank - 0.5 for rank in range(num_ranks + 1)]
        axes.hlines(bounds, 0, right, color=theme.paper, linewidth=gap_pt, zorder=3)


def _mean(red: float, green: float, blue: float, weight: float) -> tuple[float, float, float, float]:
    if not weight:
        return 0.0, 0.0, 0.0, 0.0
    return min(1.0, red / weight), min(1.0, green / weight), min(1.0, blue / weight), min(1.0, weight)


def _shade(virtual: int, num_virtual: int) -> float:
    return 1.0 - 0.55 * virtual / (num_virtual - 1) if num_virtual > 1 else 1.0


def _number_microbatches(
    axes: Axes, forecast: Forecast, spans: Sequence[RankAction], time: Scale, theme: Theme
) -> None:
    """Write the microbatch into each box with room for it."""
    if height_of(axes) / forecast.placement.num_ranks < _LEAST_ROW_PT:
        return
    unit_pt = width_of(axes) * time.unit / (forecast.timeline.makespan_s or 1.0)
    for rank, span in spans:
        label = str(span.action.microbatch)
        if (span.end_s - span.start_s) / time.unit * unit_pt >= _CHAR_PT * len(label) + 2:
            middle = (span.start_s + span.end_s) / 2 / time.unit
            color = ON_DARK if span.action.kind in "FI" else ON_LIGHT
            if forecast.placement.virtual_of(span.action.stage):
                color = theme.ink
            axes.text(middle, rank, label, ha="center", va="center_baseline", fontsize=6.5, color=color)
