"""The ranks, one row each: one step of the schedule, compute time, and memory compared with the limit."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from manifests.command.palette import MEMORY_COLORS, PLAIN, Theme, ink_on
from manifests.command.sizes import show_bytes
from manifests.placement import Placement
from manifests.schedules.picture import Box, View, action_color, legend_of, ticks, view_of
from reshard.draw.theme import SMALLEST_PT, byte_scale, draw_bars, height_of, label_numbers, width_of
from reshard.estimate.training_estimate import Forecast
from reshard.formatting import number_runs

MOST_LABELLED = 40  # ranks; with more, rows have no room for a number
_ROW = 0.82  # filled share of a row
_MOST_BOXES = 6000  # of a schedule; more are drawn as pixels
_DIGIT_PT = 0.64 * SMALLEST_PT
_TICK_PT = 45  # between two numbers of the axis of time, at least
_LEGEND_PT = 38  # below the axis
_DASHED = (0, (4, 2))


def draw_schedule(axes: Axes, forecast: Forecast, theme: Theme) -> None:
    """Draw every action, or of a long step its beginning and its end; blanks are waiting."""
    num_ranks, placement = forecast.placement.num_ranks, forecast.placement
    view = view_of(forecast.timeline, forecast.num_microbatches, _readable_s(forecast, width_of(axes)))
    boxes, width_s = list(view.boxes(forecast.timeline)), view.width_s or 1.0
    axes.set_xlim(0, width_s)
    rows = ((0.0, width_s, *row_edges(rank, num_ranks)) for rank in range(num_ranks))
    draw_bars(axes, rows, theme.faint, linewidth=0)
    is_raster = len(boxes) > _MOST_BOXES
    _draw_boxes(axes, boxes, placement, edgecolor=theme.paper, rasterized=is_raster)
    if not is_raster and height_of(axes) / num_ranks >= 1.3 * SMALLEST_PT:
        _number_microbatches(axes, boxes, placement)
    number_rows(axes, forecast, theme)
    _number_times(axes, view, forecast)
    title = f"Schedule: {forecast.schedule}, {forecast.num_microbatches} microbatches"
    axes.set_title(title, pad=20 if view.num_cut else 6)
    if view.num_cut:
        _mark_cut(axes, view, theme)
    entries = legend_of({box.action.kind for box in boxes}, placement)
    entries.append((f"waiting, {forecast.timeline.bubble:.1%} of the time", theme.faint))
    if is_raster:
        entries.append(("mixed: too short to tell apart", "none"))
    put_legend(axes, [Patch(color=color, label=text) for text, color in entries], 4 if len(entries) == 4 else 3)


def _readable_s(forecast: Forecast, width_pt: float) -> float:
    """Return how many seconds fit, with forwards half as wide as the number of a microbatch."""
    digits = len(str(forecast.num_microbatches - 1))
    return 2 * _mean_forward_s(forecast) * width_pt / (_DIGIT_PT * digits + 2)


def _mean_forward_s(forecast: Forecast) -> float:
    return sum(time.forward for time in forecast.times) / len(forecast.times)


def _draw_boxes(axes: Axes, boxes: Sequence[Box], placement: Placement, *, rasterized: bool, edgecolor: str) -> None:
    """Draw the boxes, one path for all of a color, to keep the file small. Pixels mix what is shorter than one."""
    colors = {
        action: action_color(action, placement) for action in {box.action._replace(microbatch=0) for box in boxes}
    }
    groups: dict[str, list[Box]] = {}
    for box in boxes:
        groups.setdefault(colors[box.action._replace(microbatch=0)], []).append(box)
    point = axes.get_xlim()[1] / width_of(axes)
    for color, members in groups.items():
        shortest_pt = min(box.right - box.left for box in members) / point
        bars = ((box.left, box.right, *row_edges(box.rank, placement.num_ranks)) for box in members)
        linewidth = 0 if rasterized else min(0.4, shortest_pt / 12)
        draw_bars(axes, bars, color, edgecolor=edgecolor, linewidth=linewidth, rasterized=rasterized)


def _number_microbatches(axes: Axes, boxes: Sequence[Box], placement: Placement) -> None:
    """Write the microbatch into each box that is wide enough."""
    point = axes.get_xlim()[1] / width_of(axes)
    for box in boxes:
        label = str(box.action.microbatch)
        if (box.right - box.left) / point >= _DIGIT_PT * len(label) + 2:
            axes.text(
                (box.left + box.right) / 2, box.rank, label, ha="center", va="center_baseline", fontsize=SMALLEST_PT,
                color=ink_on(action_color(box.action, placement)),
            )  # fmt: skip


def _number_times(axes: Axes, view: View, forecast: Forecast) -> None:
    """Number the axis on both sides of a cut: in ms if times were measured, else in mean forward passes of a stage."""
    name, unit = "time, ms", 1e-3
    if not forecast.assumed.measured:
        name, unit = "time, in mean forward passes of a stage", _mean_forward_s(forecast) or 1.0
    most = max(2, int(width_of(axes) / _TICK_PT))
    # The interval is that of the visible time, as if it were one piece.
    first, second = ticks(0, (view.width_s or unit) / unit, most)[:2]
    spare_s = _TICK_PT / 2 * view.width_s / width_of(axes) if view.num_cut else 0.0
    times = [number * (second - first) for number in range(int(view.end_s / unit / (second - first)) + 1)]
    shown = [t for t in times if t * unit <= view.head_s - spare_s or t * unit >= view.tail_s + spare_s]
    axes.set_xticks([view.place(t * unit) for t in shown], [f"{t:g}" for t in shown])
    axes.set_xlabel(name)


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


def draw_work(axes: Axes, forecast: Forecast, theme: Theme) -> None:
    """Draw each rank's compute time for a microbatch, relative to the slowest rank."""
    times, marked = forecast.rank_times, forecast.bottleneck
    most = max(times) or 1.0
    shares = [100 * time / most for time in times]
    rows = [(0.0, share, *row_edges(rank, len(times))) for rank, share in enumerate(shares)]
    for color, is_marked in ((PLAIN, False), (theme.ink, True)):
        draw_bars(axes, (row for rank, row in enumerate(rows) if (rank in marked) == is_marked), color, linewidth=0)
    mean = sum(shares) / len(shares)
    axes.axvline(mean, color=theme.ink, linewidth=0.9, linestyle=_DASHED)
    if len(times) <= MOST_LABELLED:
        for rank, share in enumerate(shares):
            _write_right(axes, rank, f"{share:.0f} %", bold=rank in marked, color=theme.ink)
    axes.set(xlim=(0, 165), xticks=(0, 50, 100), xlabel="% of the slowest rank's time")
    axes.set_title("Work")
    number_rows(axes, forecast, theme, labels=False)
    put_legend(axes, [Line2D([], [], color=theme.ink, linewidth=0.9, linestyle=_DASHED, label=f"mean, {mean:.0f} %")])


def draw_memory(axes: Axes, forecast: Forecast, theme: Theme) -> None:
    """Draw each rank's memory by category, and the limit."""
    ranks, limit = forecast.memory.ranks, forecast.assumed.memory_limit
    most = max(memory.total for memory in ranks)
    scale = byte_scale(max(most, limit or 0))
    starts = [0.0] * len(ranks)
    for part, color in MEMORY_COLORS.items():
        ends = [start + getattr(memory, part) / scale.unit for start, memory in zip(starts, ranks, strict=True)]
        edges = [row_edges(rank, len(ranks)) for rank in range(len(ranks))]
        bars = ((start, end, *edge) for start, end, edge in zip(starts, ends, edges, strict=True) if end > start)
        draw_bars(axes, bars, color, linewidth=0)
        starts = ends
    if len(ranks) <= MOST_LABELLED:
        for rank, memory in enumerate(ranks):
            is_over = rank in forecast.ranks_over_limit
            text = ("over: " if is_over else "") + scale.show(memory.total)
            _write_right(axes, rank, text, bold=is_over, color=theme.alarm if is_over else theme.ink)
    title, num_over = "Memory", len(forecast.ranks_over_limit)
    limit_color = theme.alarm if num_over else theme.ink
    if limit:
        axes.axvline(limit / scale.unit, color=limit_color, linewidth=1.4)
        title += f": {num_over} of {len(ranks)} over the limit" if num_over else ": within the limit"
    right = max(most, limit or 0) / scale.unit * 1.35 or 1
    axes.set(
        xlim=(0, right),
        xticks=ticks(0, right, 5),
        xlabel=f"{scale.name}, estimated for {forecast.assumed.policy}",
    )
    axes.set_title(title, color=limit_color)
    number_rows(axes, forecast, theme, labels=False)
    handles: list[Artist] = [
        Patch(color=color, label=part.removeprefix("receive_")) for part, color in MEMORY_COLORS.items()
    ]
    if limit:
        handles.append(Line2D([], [], color=limit_color, linewidth=1.4, label=f"limit, {show_bytes(limit)}"))
    put_legend(axes, handles)


def row_height(num_ranks: int) -> float:
    return _ROW if num_ranks <= MOST_LABELLED else 1.0


def row_edges(rank: int, num_ranks: int) -> tuple[float, float]:
    """Return the edges of a rank's row, as far as it is filled."""
    half = row_height(num_ranks) / 2
    return rank - half, rank + half


def number_rows(axes: Axes, forecast: Forecast, theme: Theme, *, labels: bool = True) -> None:
    """Number the rows, rank 0 on top, and mark the bottleneck's."""
    num_ranks, marked = forecast.placement.num_ranks, forecast.bottleneck
    axes.set_ylim(num_ranks - 0.45, -0.55)
    axes.tick_params(axis="y", length=0, pad=6)
    for first, last in number_runs(marked):
        axes.axhspan(first - 0.5, last + 0.5, facecolor=theme.faint, linewidth=0, zorder=0)
    if not labels:
        axes.set_yticks([])
        return
    shown = label_numbers(num_ranks, MOST_LABELLED, marked[:8])
    axes.set_yticks(shown, [str(rank) for rank in shown])
    axes.set_ylabel("rank")
    for rank, label in zip(shown, axes.get_yticklabels(), strict=True):
        if rank in marked:
            label.set(color=theme.ink, fontweight="bold")
    for first, last in number_runs(marked):
        axes.plot(
            (-0.004, -0.004), (first - 0.45, last + 0.45), transform=axes.get_yaxis_transform(), color=theme.ink,
            linewidth=3, clip_on=False, solid_capstyle="butt",
        )  # fmt: skip


def _write_right(axes: Axes, rank: int, text: str, *, bold: bool, color: str) -> None:
    axes.annotate(
        text, (1, rank), (-3, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points", ha="right",
        va="center_baseline", fontsize=SMALLEST_PT, fontweight="bold" if bold else "normal", color=color,
    )  # fmt: skip


def put_legend(axes: Axes, handles: Sequence[Artist], ncols: int = 3) -> None:
    height_pt = height_of(axes)
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -_LEGEND_PT / height_pt), ncols=ncols, borderaxespad=0,
        borderpad=0, handlelength=1, handleheight=0.9, columnspacing=1.1,
    )  # fmt: skip
