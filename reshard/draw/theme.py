"""Settings of matplotlib, and what it does not write into an SVG: its title, and its colors in dark mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

import matplotlib as mpl

from manifests.command.palette import THEMES, Theme

SMALLEST_PT = 8.25  # 11 px at 100 %


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
    told = f'\n <title id="title">{escape(title)}</title>\n <desc id="desc">{escape(text)}</desc>'
    return svg[:start] + opening + told + svg[end:]


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
