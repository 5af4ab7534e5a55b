"""The ranks, one row each: the time of a microbatch, and memory compared with the limit."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from manifests.command.palette import MEMORY_COLORS, PLAIN, Theme
from manifests.command.sizes import show_bytes
from reshard.draw.scale import byte_scale, draw_bars, height_of, ticks
from reshard.draw.theme import SMALLEST_PT
from reshard.estimate.training_estimate import Forecast
from reshard.formatting import number_runs

MOST_LABELLED = 40  # ranks; with more, rows have no room for a number
_ROW = 0.82  # filled share of a row
_LEGEND_PT = 38  # below the axis
_DASHED = (0, (4, 2))


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
        xticks=[tick for tick in MaxNLocator(nbins=5).tick_values(0, right) if tick <= right],
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
    shown = ticks(num_ranks, MOST_LABELLED, marked[:8])
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
