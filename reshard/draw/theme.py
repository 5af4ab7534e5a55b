"""Settings of matplotlib, titles and dark colors of an SVG, and bars, units and sizes of axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from manifests.command.palette import THEMES, Theme

SMALLEST_PT = 8.25  # 11 px at 100 %
Bar = tuple[float, float, float, float]  # left, right, bottom, top
_CORNERS = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)


@contextmanager
def drawing(theme: Theme) -> Iterator[None]:
    """Draw with these settings only, whatever matplotlib's configuration is."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "svg.hashsalt": "reshard",
                "svg.fonttype": "none",  # text stays text
                "font.family": ["DejaVu Sans"],
                "font.size": 8.5,
                "figure.facecolor": theme.paper,
                "savefig.facecolor": theme.paper,
                "axes.facecolor": "none",
                "axes.edgecolor": theme.quiet,
                "axes.labelcolor": theme.quiet,
                "axes.linewidth": 0.6,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.titlecolor": theme.ink,
                "axes.titlelocation": "left",
                "axes.titlesize": 10,
                "axes.titleweight": "bold",
                "legend.frameon": False,
                "legend.labelcolor": theme.quiet,
                "legend.fontsize": SMALLEST_PT,
                "text.color": theme.ink,
                "xtick.color": theme.quiet,
                "ytick.color": theme.quiet,
            }
        )
        yield


def describe(svg: str, title: str, text: str) -> str:
    """Add a role to a picture, and a title and a description for those who cannot see it."""
    svg = svg.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    start = svg.index("<svg")
    end = svg.index(">", start) + 1
    opening = svg[start:end].replace("<svg", '<svg role="img" aria-labelledby="title desc"', 1)
    texts = f'\n <title id="title">{escape(title)}</title>\n <desc id="desc">{escape(text)}</desc>'
    return svg[:start] + opening + texts + svg[end:]


def follow_reader(svg: str) -> str:
    """Let a light picture be dark where the reader prefers that; programs without style sheets show it light."""
    light, dark = THEMES["light"].colors, THEMES["dark"].colors
    rules = [
        f'[style*="{what}: {color}"] {{ {what}: {dark[name]} !important }}'
        for name, color in light.items()
        for what in ("fill", "stroke")
    ]
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    at = svg.index("</desc>") + len("</desc>")
    return f"{svg[:at]}\n {style}{svg[at:]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """An axis in multiples of `unit`."""

    name: str
    unit: float

    def show(self, value: float) -> str:
        """Return a value with three digits, without its unit."""
        if not value:
            return "0"
        scaled = value / self.unit
        return f"{scaled:.0f}" if scaled >= 99.95 else f"{scaled:.1f}" if scaled >= 9.995 else f"{scaled:.2f}"


def byte_scale(most: int) -> Scale:
    """Choose the unit in which the largest size has one to four digits before the point, as `show_bytes` does."""
    name, unit = "B", 1
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if most < 1024 * unit:
            break
        name, unit = larger, unit * 1024
    return Scale(name=name, unit=unit)


def label_numbers(count: int, most: int, wanted: Sequence[int]) -> list[int]:
    """Choose which of `count` numbers to show: all up to `most`, else some, including the wanted ones and the last."""
    step = 1
    while count > most * step:
        step *= 2
    required = {*wanted, count - 1}
    regular = (n for n in range(0, count, step) if all(abs(n - other) >= 0.75 * step for other in required))
    return sorted({*regular, *required})


def width_of(axes: Axes) -> float:
    """Return the width of axes in points."""
    return float(axes.get_position().width * _figure_of(axes).get_figwidth() * 72)


def height_of(axes: Axes) -> float:
    """Return the height of axes in points."""
    return float(axes.get_position().height * _figure_of(axes).get_figheight() * 72)


def _figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def draw_bars(axes: Axes, bars: Iterable[Bar], color: str, **style: Any) -> None:
    """Draw bars of one color as one path, which is faster than a patch for each, and a smaller file."""
    corners: list[tuple[float, float]] = []
    for left, right, low, high in bars:
        corners += (left, low), (right, low), (right, high), (left, high), (left, low)
    if corners:
        path = Path(corners, _CORNERS * (len(corners) // len(_CORNERS)))
        axes.add_artist(PathPatch(path, facecolor=color, **style))  # add_patch would look for limits in each corner
