"""Errors of layouts, which point at a character of the spec."""

from __future__ import annotations

from manifests.errors import LayoutError, UsageError
from reshard.formatting import WIDTH, in_one_line

WHERE = "layout"


class SpecError(LayoutError):
    """An invalid layout on the command line, hence exit code 2; one in a file is bad input (3)."""

    exit_code = UsageError.exit_code


def error_at(spec: str, position: int, problem: str, hint: str = "", *, code: str) -> LayoutError:
    """Return an error that shows the spec with a caret under `position`."""
    start = max(0, min(position - WIDTH // 2, len(spec) - WIDTH))
    head, tail = "…" if start else "", "…" if len(spec) > start + WIDTH else ""
    shown = head + in_one_line(spec[start : start + WIDTH]) + tail
    shown = f"{problem}\n  {shown}\n  {' ' * (len(head) + position - start)}^"
    return SpecError(WHERE, shown, hint, code=code)


def shorten(spec: str) -> str:
    """Shorten a spec to fit into a sentence."""
    return in_one_line(spec if len(spec) <= WIDTH else spec[: WIDTH - 1] + "…")
