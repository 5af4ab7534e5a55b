"""The picture as a self-contained HTML page: no script, nothing fetched, light or dark by the reader's setting."""

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
    """Return the page: the picture, with colors from the style sheet, and the table below it."""
    return _PAGE.substitute(
        title=escape(headline(planned)),
        light=_colors("light"),
        dark=_colors("dark"),
        picture=_inline(draw_sheet(planned, THEMES["light"], "svg").decode(), bottleneck(planned.forecast)),
        table=escape(plan_text(planned)),
    )


def _colors(theme: str) -> str:
    return " ".join(f"--{name}: {color};" for name, color in THEMES[theme].colors.items())


def _inline(svg: str, label: str) -> str:
    """Embed an SVG file in the page; its colors become those of the style sheet."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    for name, color in THEMES["light"].colors.items():
        svg = svg.replace(f": {color}", f": var(--{name})")
    return svg.rstrip()
