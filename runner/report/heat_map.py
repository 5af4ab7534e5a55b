"""The load of experts as a heat map, layer by expert, as SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from manifests.schedules.picture import text_anchor, ticks
from runner.report.charts import number_axis
from runner.report.read import Line

_ROW = 14  # pixels
_FULL = 2.0  # times the mean: the load that is drawn black, or white on a dark page


def draw_load(lines: Sequence[Line]) -> list[str]:
    """Return a picture of the load over the last tenth of the recorded steps; nothing if none was recorded."""
    recorded = [line for line in lines if line.get("expert_load")]
    recorded = recorded[-max(1, len(recorded) // 10) :]
    sums = defaultdict[int, list[int]](list)
    for line in recorded:
        for layer, counts in line["expert_load"].items():
            before = sums[int(layer)]
            sums[int(layer)] = [a + b for a, b in zip(before or [0] * len(counts), counts, strict=False)]
    loads = {layer: counts for layer, counts in sorted(sums.items()) if sum(counts)}
    if not loads:
        return []
    widest, parts, height = max(map(len, loads.values())), [], len(loads) * _ROW
    for row, ((name, layer), counts) in enumerate(zip(number_axis("layer", [*loads]), loads.values(), strict=True)):
        y, mean = row * _ROW, sum(counts) / len(counts)
        parts.append(f'<text class="level" x="-6" y="{y + _ROW - 3}">{name}{layer}</text>')
        edges = [100 * expert / widest for expert in range(len(counts) + 1)]
        for expert, ((begin, end), count) in enumerate(zip(pairwise(edges), counts, strict=True)):
            share = count / mean
            parts.append(
                f'<rect class="load" x="{begin:.2f}%" y="{y}" width="{end - begin:.2f}%" height="{_ROW}" '
                f'fill-opacity="{min(1.0, share / _FULL):.2f}">'
                f"<title>layer {layer}, expert {expert}: {share:.2f} of the mean</title></rect>"
            )
    for name, at in number_axis("expert", ticks(0, widest - 1, 8)):
        x = 100 * (at + 0.5) / widest
        parts.append(f'<text x="{x:.2f}%" y="{height + _ROW}" text-anchor="{text_anchor(x)}">{name}{at:g}</text>')
    first, last = recorded[0]["step"], recorded[-1]["step"]
    worst = max(loads, key=lambda layer: max(loads[layer]) / sum(loads[layer]) * len(loads[layer]))
    most = max(loads[worst]) / sum(loads[worst]) * len(loads[worst])
    title = f"Load of experts by layer, steps {first} to {last}"
    return [
        "<h2>Load of experts</h2>",
        f'<svg class="heat" role="img" width="100%" height="{height + _ROW + 4}"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg>",
        f"<p class=note>Tokens of each expert over the recorded steps {first} to {last}, relative to the mean of its "
        f"layer: none is blank, twice the mean has the full contrast. The largest is {most:.2f} of the mean, in layer "
        f"{worst}.</p>",
    ]
