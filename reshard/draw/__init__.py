"""Pictures of a plan: its stages, a step of its schedule, and what each rank computes and holds.

matplotlib draws them. It is an extra, `reshard[draw]`, imported when a picture is asked for.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from manifests.errors import OutputError, UsageError
from manifests.probe import check_new_file
from manifests.store import write_file

if TYPE_CHECKING:
    from reshard.operations.resolve import PlanResult

__all__ = ["check_picture", "draw_plan"]

SUFFIXES = (".svg", ".png", ".html")


def check_picture(path: Path, force: bool) -> None:
    """Refuse early what could not be drawn, or may not be written over.

    Raises:
        UsageError: another kind of file, or no matplotlib.
        OutputError: the file exists and `force` is not given, or its folder takes no file.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            "--draw", f"{path.name!r} is no picture", f"end it in {', '.join(SUFFIXES)}", code="options.draw-suffix"
        )
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--draw",
            "matplotlib draws the pictures, and is not installed",
            "pip install 'reshard[draw]'",
            code="options.needs-matplotlib",
        )
    check_new_file(path, "--draw", force=force)


def draw_plan(planned: PlanResult, path: Path, theme: str = "light") -> None:
    """Write the picture of a plan, of the kind that its name says. The same plan gives the same bytes.

    Raises:
        UsageError: the step is too long to simulate.
        OutputError: the file cannot be written.
    """
    from reshard.draw.page import html_page
    from reshard.draw.sheet import draw_sheet
    from reshard.draw.theme import THEMES

    if planned.forecast.step is None:
        raise UsageError(
            "--draw",
            "a step of so many microbatches is too long to simulate",
            "say fewer --microbatches",
            code="options.too-many-microbatches",
        )
    suffix = path.suffix.lower()
    if suffix == ".html":
        data = html_page(planned).encode()
    else:
        data = draw_sheet(planned, THEMES[theme], "svg" if suffix == ".svg" else "png")
    try:
        write_file(path, data)
    except OSError as error:
        raise OutputError(str(path), f"cannot be written: {error.strerror}", code="output.unwritable") from error
