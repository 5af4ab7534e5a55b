"""Colours and type, light and dark.

Colours that mean something are the same in both, so that one SVG can follow the reader's choice; those of
one panel stay apart for readers with any of the three colour blindnesses, and no meaning rests on them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib as mpl

__all__ = [
    "ACCENT",
    "KIND_COLOURS",
    "MEMORY_COLOURS",
    "ON_DARK",
    "ON_LIGHT",
    "PLAIN",
    "THEMES",
    "WORK_COLOURS",
    "Theme",
    "drawing",
]

BLUE, AMBER, TEAL, BRICK, LAVENDER = "#2f74c0", "#f0a92e", "#5fc0a8", "#b4472a", "#b9a4d6"
ACCENT, PLAIN = "#c8512f", "#8d939c"

# What modules are.
KIND_COLOURS: Mapping[str, str] = {
    "embedding": AMBER,
    "dense layers": BLUE,
    "expert layers": TEAL,
    "MTP layers": BRICK,
    "norm and head": LAVENDER,
}
# What ranks do: F, B, I and W of `manifests.schedules.Action`.
WORK_COLOURS: Mapping[str, tuple[str, str]] = {
    "F": ("forward", BLUE),
    "B": ("backward", AMBER),
    "I": ("backward, of inputs", BRICK),
    "W": ("backward, of weights", TEAL),
}
ON_DARK, ON_LIGHT = "#ffffff", "#121212"  # text on those colours
# Parts of `manifests.memory.Memory`.
MEMORY_COLOURS: Mapping[str, str] = {
    "weights": "#17607d",
    "gradients": "#4a9cbc",
    "optimizer": "#a9d6e5",
    "activations": "#d9822b",
    "wires": PLAIN,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """What changes between light and dark."""

    paper: str
    ink: str
    quiet: str  # second-rank text, axes
    faint: str  # waiting, bands

    @property
    def colours(self) -> Mapping[str, str]:
        return {"paper": self.paper, "ink": self.ink, "quiet": self.quiet, "faint": self.faint}


THEMES: Mapping[str, Theme] = {
    "light": Theme(paper="#fefefe", ink="#1b1f24", quiet="#57606a", faint="#e7eaee"),
    "dark": Theme(paper="#0e1116", ink="#e8ebef", quiet="#a3acb7", faint="#252b33"),
}


@contextmanager
def drawing(theme: Theme) -> Iterator[None]:
    """Draw by these settings and no one else's, the same way each time."""
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
