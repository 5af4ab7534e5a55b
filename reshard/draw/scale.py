"""Units, ticks and sizes of axes, and bars on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

Bar = tuple[float, float, float, float]  # left, right, bottom, top
_CORNERS = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)


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


def second_scale(most: float) -> Scale:
    for name, unit in (("s", 1.0), ("ms", 1e-3)):
        if most >= unit:
            return Scale(name=name, unit=unit)
    return Scale(name="µs", unit=1e-6)


def ticks(count: int, most: int, wanted: Sequence[int] = ()) -> list[int]:
    """Choose which of `count` numbers to show: all up to `most`, else some, including the wanted ones and the last."""
    step = 1
    while count > most * step:
        step *= 2
    kept = sorted({*wanted, count - 1})
    regular = (number for number in range(0, count, step) if all(abs(number - other) >= 0.75 * step for other in kept))
    return sorted({*regular, *kept})


def width_of(axes: Axes) -> float:
    """Return the width of axes in points."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return float(axes.get_position().width * figure.get_figwidth() * 72)


def height_of(axes: Axes) -> float:
    """Return the height of axes in points."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return float(axes.get_position().height * figure.get_figheight() * 72)


def draw_bars(axes: Axes, bars: Iterable[Bar], color: str, **style: Any) -> None:
    """Draw bars of one color as one path, which is faster than a patch for each, and a smaller file."""
    corners: list[tuple[float, float]] = []
    for left, right, low, high in bars:
        corners += (left, low), (right, low), (right, high), (left, high), (left, low)
    if corners:
        path = Path(corners, _CORNERS * (len(corners) // len(_CORNERS)))
        axes.add_artist(PathPatch(path, facecolor=color, **style))  # add_patch would look for limits in each corner
