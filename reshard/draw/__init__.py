"""Pictures of a plan: its stages, one step of the schedule, and each rank's compute time and memory.

They are drawn with matplotlib, an extra (`reshard[draw]`) that is imported on use.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from manifests.errors import UsageError, system_errors
from manifests.store import write_file
from reshard.formatting import list_words
from stores.folders.probe import check_new_file

if TYPE_CHECKING:
    from reshard.packing.plan import PlanResult
    from reshard.search.search import SearchResult

__all__ = ["check_picture", "draw_plan", "draw_search"]

_SUFFIXES = (".svg", ".png")


def check_picture(path: Path, force: bool) -> None:
    """Check early that a picture can be drawn and written."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(
            "--draw",
            f"expected a name that ends in {list_words(_SUFFIXES)}, found {path.name!r}",
            code="options.draw-suffix",
        )
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--draw",
            "needs matplotlib, which is not installed",
            "pip install 'reshard[draw]'",
            code="options.needs-matplotlib",
        )
    check_new_file(path, "--draw", force=force)


def draw_plan(planned: PlanResult, path: Path, theme: str) -> None:
    """Write the picture of a plan, in the format of the file's suffix. The same plan gives the same bytes.

    The theme `auto` is that of the reader's setting, in a PNG `light`.
    """
    from manifests.command.interpreter import collector_paused
    from reshard.draw.sheet import draw_sheet

    if planned.forecast.step is None:
        raise UsageError(
            "--draw",
            f"a step of {planned.forecast.num_microbatches} microbatches is too long to simulate",
            "lower --microbatches",
            code="options.too-many-microbatches",
        )
    with collector_paused():
        data = draw_sheet(planned, theme, _form(path))
    _write(path, data)


def draw_search(result: SearchResult, path: Path, theme: str) -> None:
    """Write the picture of a search, as SVG or PNG; see `draw_plan`."""
    from reshard.draw.sheet import draw_figure, search_figure, search_title

    figure_of, about = partial(search_figure, result), "memory against pipeline bubble"
    _write(path, draw_figure(figure_of, theme, _form(path), search_title(result), about))


def _form(path: Path) -> Literal["svg", "png"]:
    return "png" if path.suffix.lower() == ".png" else "svg"


def _write(path: Path, data: bytes) -> None:
    with system_errors(path, "cannot be written", code="output.unwritable"):
        write_file(path, data)
