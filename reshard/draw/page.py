"""The picture as a page that stands alone: no script, nothing fetched, light or dark as the reader's system is."""

from __future__ import annotations

import re
from html import escape
from string import Template

from reshard.draw.sheet import draw_sheet, headline
from reshard.draw.theme import THEMES
from reshard.operations.resolve import PlanResult
from reshard.report.plan import bottleneck, plan_text

__all__ = ["html_page"]

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { $light }
@media (prefers-color-scheme: dark) { :root { $dark } }
body { margin: 0 auto; max-width: 1300px; padding: 0 8px 24px; background: var(--paper); color: var(--ink); }
svg { width: 100%; height: auto; }
pre { overflow-x: auto; padding: 0 4%; font-size: 12px; }
</style>
</head>
<body>
$picture
<pre>$table</pre>
</body>
</html>
""")


def html_page(planned: PlanResult) -> str:
    """Give the page: the picture, its colours left to the style sheet, and the table below it."""
    return _PAGE.substitute(
        title=escape(headline(planned)),
        light=_colours("light"),
        dark=_colours("dark"),
        picture=_inline(draw_sheet(planned, THEMES["light"], "svg").decode(), bottleneck(planned.forecast)),
        table=escape(plan_text(planned)),
    )


def _colours(theme: str) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in THEMES[theme].colours.items())


def _inline(svg: str, label: str) -> str:
    """Make an SVG file a part of the page: its own colours become the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    for name, colour in THEMES["light"].colours.items():
        svg = svg.replace(f": {colour}", f": var(--{name})")
    return svg.rstrip()
