"""The pictures as SVG or PNG: a plan on one sheet; of a search, memory against bubble, with a dot for every layout."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from manifests.command.palette import PLAIN, THEMES, Theme
from manifests.command.sizes import show_bytes
from reshard.draw.panels import draw_memory, draw_schedule, draw_stages, draw_work
from reshard.draw.theme import describe, drawing, follow_reader
from reshard.formatting import shorten
from reshard.packing.plan import PlanResult
from reshard.plans.pack_plan import traffic_of
from reshard.report.plan_summary import bottleneck, memory_line, not_fitting, placement_line, schedule_line
from reshard.search.candidates import MARGIN
from reshard.search.search import SearchResult

Form = Literal["svg", "png"]
# Inches.
_WIDTH, _LEFT, _RIGHT = 13.0, 0.62, 0.25
_TITLE, _STAGES, _EACH_TIE, _BELOW_STAGES, _BELOW_RANKS, _GAP = 0.32, 0.8, 0.22, 1.3, 1.05, 0.22
_PANELS = ((draw_schedule, 0.6), (draw_work, 0.14), (draw_memory, 0.26))  # shares of the width
_DPI = 130
_CELLS = 300  # of a search, in each direction: dots in the same cell are drawn once
_GIB = 1 << 30


def draw_sheet(planned: PlanResult, theme: str, form: Form) -> bytes:
    """Return the picture: what to know in words, stages below it, and then ranks."""
    description = ". ".join(text for text, *_ in facts(planned, THEMES["light"])[1:])
    return draw_figure(partial(sheet_of, planned), theme, form, headline(planned), description)


def draw_figure(figure_of: Callable[[Theme], Figure], theme: str, form: Form, title: str, description: str) -> bytes:
    """Return a figure in colors of a theme; with `auto`, an SVG follows the reader's setting, and a PNG is light."""
    colors = THEMES.get(theme, THEMES["light"])
    with drawing(colors):
        picture = _save(figure_of(colors), form)
    if form == "png":
        return picture
    svg = describe(picture.decode(), title, description)
    return (svg if theme in THEMES else follow_reader(svg)).encode()


def sheet_of(planned: PlanResult, theme: Theme) -> Figure:
    """Return the picture as a figure, drawn with the settings of `drawing`."""
    lines = facts(planned, theme)
    top = 0.12 + sum(size for _, _, size, _ in lines) / 72 * 1.45 + _TITLE
    rows = _rows_height(planned.layout.placement.num_ranks)
    stages = _STAGES + _EACH_TIE * min(3, len(planned.plan.ties))
    bottom = height = top + stages + _BELOW_STAGES + rows + _BELOW_RANKS
    figure = Figure(figsize=(_WIDTH, height))
    _write_header(figure, lines, height)
    inner = _WIDTH - _LEFT - _RIGHT
    bottom -= top + stages
    draw_stages(_place(figure, _LEFT, bottom, inner, stages), planned, theme)
    bottom -= _BELOW_STAGES
    x = _LEFT
    for draw, share in _PANELS:
        draw(_place(figure, x, bottom - rows, share * inner - _GAP, rows), planned.forecast, theme)
        x += share * inner + (_GAP / 2)
    return figure


def headline(planned: PlanResult) -> str:
    return f"{shorten(planned.name)}: {shorten(planned.layout.spec)}"


def facts(planned: PlanResult, theme: Theme) -> list[tuple[str, str, float, str]]:
    """Return what to know, the most important first: each line's text, color, size in points and weight."""
    shape, forecast = planned.shape, planned.forecast
    nbytes = traffic_of(planned.plan.shards_on()).write_nbytes
    model = (
        f"{shape.architecture}, {shape.num_params:,} parameters, {show_bytes(nbytes)}; {placement_line(planned.layout)}"
    )
    return [
        (headline(planned), theme.ink, 14.0, "bold"),
        *((line, theme.alarm, 11.0, "bold") for line in not_fitting(planned)),
        (bottleneck(forecast), theme.ink, 11.0, "bold"),
        (schedule_line(forecast), theme.quiet, 8.5, "normal"),
        (memory_line(forecast), theme.quiet, 8.5, "normal"),
        (model, theme.quiet, 8.5, "normal"),
    ]


def _rows_height(num_ranks: int) -> float:
    if num_ranks <= 8:
        return max(0.9, 0.42 * num_ranks)
    return 0.26 * num_ranks if num_ranks <= 32 else 8.0


def _place(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    """Add axes, placed in inches."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((x / wide, y / high, width / wide, height / high))


def _write_header(figure: Figure, lines: Sequence[tuple[str, str, float, str]], height: float) -> None:
    top = height - 0.12
    for text, color, size, weight in lines:
        figure.text(
            _LEFT / _WIDTH, top / height, text, color=color, fontsize=size, fontweight=weight, va="top",
            parse_math=False,
        )  # fmt: skip
        top -= size / 72 * 1.45


def _save(figure: Figure, form: Form) -> bytes:
    """Return a figure as SVG or PNG."""
    buffer = io.BytesIO()
    # No time and no library version: the same plan gives the same bytes.
    metadata = {"svg": dict.fromkeys(("Creator", "Date", "Format", "Type")), "png": {"Software": None}}
    figure.savefig(buffer, format=form, dpi=_DPI, metadata=metadata[form])
    return buffer.getvalue()


def search_figure(result: SearchResult, theme: Theme) -> Figure:
    """Return a search as a figure, with the limit, and a ring around the chosen layout; see `sheet_of`."""
    axes = (figure := Figure(figsize=(5.2, 4.0))).add_axes((0.11, 0.15, 0.85, 0.71))
    limit, most = result.limit / _GIB, 2 * result.limit / _GIB
    points = [(choice.forecast.memory / _GIB, 100 * choice.forecast.bubble) for choice in result.choices]
    cells = {(int(x / most * _CELLS), int(y / 100 * _CELLS)): (x, y) for x, y in points if x <= most}
    for color, dots in (
        (PLAIN, [point for point in cells.values() if point[0] > limit]),
        (theme.ink, [point for point in cells.values() if point[0] <= limit]),
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
