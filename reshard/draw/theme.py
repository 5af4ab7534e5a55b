"""Colors and fonts, light and dark.

Colors that mean something are the same in both, so that one SVG fits both; those of one panel are distinct
with any of the three color blindnesses, and nothing is shown by color alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib as mpl

__all__ = [
    "ACCENT",
    "KIND_COLORS",
    "MEMORY_COLORS",
    "ON_DARK",
    "ON_LIGHT",
    "PLAIN",
    "THEMES",
    "WORK_COLORS",
    "Theme",
    "drawing",
]

BLUE, AMBER, TEAL, BRICK, LAVENDER = "#2f74c0", "#f0a92e", "#5fc0a8", "#b4472a", "#b9a4d6"
ACCENT, PLAIN = "#c8512f", "#8d939c"

# Kinds of modules.
KIND_COLORS: Mapping[str, str] = {
    "embedding": AMBER,
    "dense layers": BLUE,
    "expert layers": TEAL,
    "MTP layers": BRICK,
    "norm and head": LAVENDER,
}
# F, B, I and W of `manifests.schedules.Action`.
WORK_COLORS: Mapping[str, tuple[str, str]] = {
    "F": ("forward", BLUE),
    "B": ("backward", AMBER),
    "I": ("backward, input gradients", BRICK),
    "W": ("backward, weight gradients", TEAL),
}
ON_DARK, ON_LIGHT = "#ffffff", "#121212"  # text on those colors
# Fields of `manifests.memory.Memory`.
MEMORY_COLORS: Mapping[str, str] = {
    "weights": "#17607d",
    "gradients": "#4a9cbc",
    "optimizer": "#a9d6e5",
    "activations": "#d9822b",
    "wires": PLAIN,
    "temporary": "#f2c38b",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """The colors that differ between light and dark."""

    paper: str
    ink: str
    quiet: str  # secondary text, axes
    faint: str  # waiting, bands

    @property
    def colors(self) -> Mapping[str, str]:
        return {"paper": self.paper, "ink": self.ink, "quiet": self.quiet, "faint": self.faint}


THEMES: Mapping[str, Theme] = {
    "light": Theme(paper="#fefefe", ink="#1b1f24", quiet="#57606a", faint="#e7eaee"),
    "dark": Theme(paper="#0e1116", ink="#e8ebef", quiet="#a3acb7", faint="#252b33"),
}


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
                "legend.fontsize": 8,
                "text.color": theme.ink,
                "xtick.color": theme.quiet,
                "ytick.color": theme.quiet,
            }
        )
        yield
