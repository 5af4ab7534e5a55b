"""The picture as a self-contained HTML page: no script, nothing fetched, light or dark by the reader's setting."""

from __future__ import annotations

import re
from html import escape
from string import Template

from manifests.command.palette import THEMES
from reshard.draw.sheet import draw_sheet, facts, headline
from reshard.packing.resolve import PlanResult
from reshard.report.plan_summary import not_fitting, plan_text

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
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1300px; padding: 8px 16px 24px;
       background: var(--paper); color: var(--ink); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .5em 0; }
p { margin: .3em 0; color: var(--quiet); }
p.lead { font-weight: bold; color: var(--ink); }
p.alarm { font-weight: bold; color: var(--alarm); font-size: 1.15rem; }
figure { margin: 1em 0; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 1248px; height: auto; }
pre { overflow-x: auto; font-size: 12px; overflow-wrap: normal; }
@page { size: landscape; }
@media print {
  figure { overflow: visible; break-inside: avoid; } svg { min-width: 0; }
  pre { overflow: visible; font-size: 7pt; white-space: pre-wrap; }
}
</style>
</head>
<body>
<h1>$title</h1>
$facts
<figure tabindex="0" aria-label="the plan, drawn">
$picture
</figure>
<pre tabindex="0" aria-label="the plan, as a table">$table</pre>
</body>
</html>
""")


def html_page(planned: PlanResult) -> str:
    """Return the page: what to know first, the picture, and the table below it."""
    texts = [text for text, *_ in facts(planned, THEMES["light"])[1:]]
    num_alarms = len(not_fitting(planned))
    kinds = ["alarm"] * num_alarms + ["lead"] + [""] * (len(texts) - num_alarms - 1)
    svg = draw_sheet(planned, None, "svg", header=False).decode()
    picture = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :]).rstrip()
    return _PAGE.substitute(
        title=escape(headline(planned)),
        light=THEMES["light"].css,
        dark=THEMES["dark"].css,
        facts="\n".join(f'<p class="{kind}">{escape(text)}</p>' for kind, text in zip(kinds, texts, strict=True)),
        picture=picture,
        table=escape(plan_text(planned)),
    )
