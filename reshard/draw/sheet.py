"""The whole picture on one sheet, as SVG or PNG."""

from __future__ import annotations

import io
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reshard.draw.ranks import draw_memory, draw_work
from reshard.draw.schedule import draw_schedule
from reshard.draw.stages import draw_stages
from reshard.draw.theme import ACCENT, Theme, drawing
from reshard.formatting import show_bytes
from reshard.layout.wording import shorten
from reshard.operations.resolve import PlanResult
from reshard.plans.pack_plan import traffic_of
from reshard.report.layout import placement_line
from reshard.report.plan import bottleneck, memory_line, schedule_line

__all__ = ["draw_sheet", "headline"]

# Inches.
_WIDTH, _LEFT, _RIGHT = 13.0, 0.62, 0.25
_HEADER, _STAGES, _BELOW_STAGES, _BELOW_RANKS, _GAP = 1.52, 2.3, 0.9, 1.0, 0.22
_SHARES = (0.58, 0.16, 0.26)  # of the width: schedule, work, memory
_DPI = 130


def draw_sheet(planned: PlanResult, theme: Theme, form: Literal["svg", "png"]) -> bytes:
    """Return the picture: stages above, ranks below, and the bottleneck in words."""
    rows = _rows_height(planned.layout.placement.num_ranks)
    height = _HEADER + _STAGES + _BELOW_STAGES + rows + _BELOW_RANKS
    with drawing(theme):
        figure = Figure(figsize=(_WIDTH, height))
        _write_header(figure, planned, theme, height)
        inner = _WIDTH - _LEFT - _RIGHT
        draw_stages(_place(figure, _LEFT, height - _HEADER - _STAGES, inner, _STAGES), planned, theme)
        left, forecast = _LEFT, planned.forecast
        for draw, share in zip((draw_schedule, draw_work, draw_memory), _SHARES, strict=True):
            draw(_place(figure, left, _BELOW_RANKS, share * inner - _GAP, rows), forecast, theme)
            left += share * inner + (_GAP / 2)
        return _save(figure, form)


def headline(planned: PlanResult) -> str:
    return f"{shorten(planned.name)}: {shorten(planned.layout.spec)}"


def _rows_height(num_ranks: int) -> float:
    if num_ranks <= 8:
        return max(0.9, 0.42 * num_ranks)
    return 0.24 * num_ranks if num_ranks <= 32 else 8.0


def _place(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes, placed in inches."""
    wide, high = figure.get_size_inches()
    return figure.add_axes((left / wide, bottom / high, width / wide, height / high))


def _write_header(figure: Figure, planned: PlanResult, theme: Theme, height: float) -> None:
    shape, forecast = planned.shape, planned.forecast
    nbytes = traffic_of(planned.plan.shards_on()).write_nbytes
    model = (
        f"{shape.architecture}, {shape.num_params:,} parameters, {show_bytes(nbytes)}; {placement_line(planned.layout)}"
    )
    lines = (
        (headline(planned), theme.ink, 14.0, "bold"),
        (bottleneck(forecast), ACCENT if forecast.bottleneck else theme.ink, 11.0, "bold"),
        (schedule_line(forecast), theme.quiet, 8.5, "normal"),
        (memory_line(forecast), theme.quiet, 8.5, "normal"),
        (model, theme.quiet, 8.5, "normal"),
    )
    top = height - 0.16
    for text, color, size, weight in lines:
        figure.text(
            _LEFT / _WIDTH, top / height, text, color=color, fontsize=size, fontweight=weight, va="top",
            parse_math=False,
        )  # fmt: skip
        top -= size / 72 * 1.45


def _save(figure: Figure, form: str) -> bytes:
    buffer = io.BytesIO()
    # No time and no library version: the same plan gives the same bytes.
    nothing = {"svg": dict.fromkeys(("Creator", "Date", "Format", "Type")), "png": {"Software": None}}
    figure.savefig(buffer, format=form, dpi=_DPI, metadata=nothing[form])
    if form == "svg":
        return buffer.getvalue().replace(b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, sans-serif")
    return buffer.getvalue()
