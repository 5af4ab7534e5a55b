"""The picture of a search: memory against bubble, a dot for every layout, the limit, and the chosen one in a ring."""

from __future__ import annotations

from matplotlib.figure import Figure

from manifests.command.palette import PLAIN, Theme
from manifests.command.sizes import show_bytes
from reshard.search.candidates import MARGIN
from reshard.search.search import SearchResult

_CELLS = 300  # in each direction: dots in the same cell are drawn once
_GIB = 1 << 30


def search_figure(result: SearchResult, theme: Theme) -> Figure:
    """Return the picture as a figure, drawn with the settings of `drawing`."""
    axes = (figure := Figure(figsize=(5.2, 4.0))).add_axes((0.11, 0.15, 0.85, 0.71))
    limit, most = result.limit / _GIB, 2 * result.limit / _GIB
    points = [(choice.forecast.memory / _GIB, 100 * choice.forecast.bubble) for choice in result.choices]
    cells = {(int(x / most * _CELLS), int(y / 100 * _CELLS)): (x, y) for x, y in points if x <= most}
    for color, dots in (
        (PLAIN, [point for point in cells.values() if point[0] > limit]),
        (theme.quiet, [point for point in cells.values() if point[0] <= limit]),
    ):
        axes.plot([x for x, _ in dots], [y for _, y in dots], ".", color=color, markersize=3, clip_on=False)
    axes.axvline(limit, color=theme.ink, linewidth=1, linestyle=(0, (4, 2)))
    text = f"limit: {MARGIN:.0%} of {show_bytes(result.request.memory_limit)}"
    axes.annotate(
        text, (limit, 0.98), (4, 0), xycoords=axes.get_xaxis_transform(), textcoords="offset points", va="top"
    )
    words = "no layout fits within the limit"
    for choice in result.best[:1]:
        words = f"ring: {choice.candidate.layout.spec}, the fastest within the limit"
        x, y = choice.forecast.memory / _GIB, 100 * choice.forecast.bubble
        for color, width in ((theme.paper, 5.5), (theme.ink, 2)):  # a margin parts the ring from dots
            axes.plot([x], [y], "o", mfc="none", markersize=13, color=color, markeredgewidth=width, clip_on=False)
    axes.annotate(words, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", color=theme.quiet)
    axes.set_xlim(0, most)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])  # the words on the limit are above all dots
    more = sum(x > most for x, _ in points)
    axes.set_xlabel("memory of the fullest rank, GiB" + (f"\n{more:,} layouts need more than is shown" if more else ""))
    axes.set_ylabel("pipeline bubble, % of all ranks' time")
    axes.set_title(search_title(result), pad=20)
    return figure


def search_title(result: SearchResult) -> str:
    return f"{result.name} on {result.request.gpus:,} GPUs: {len(result.choices):,} layouts"
