"""The load of experts as a heat map, layer by expert, as SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from manifests.command.palette import AMBER, BLUE
from runner.report.read import Line

_ROW = 14  # pixels
_FULL = 2.0  # times the mean: the load, or its reciprocal, that has the full color


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
    widest, parts = max(map(len, loads.values())), []
    for row, (layer, counts) in enumerate(loads.items()):
        y, mean = row * _ROW, sum(counts) / len(counts)
        parts.append(f'<text class="tick" x="0" y="{y + _ROW - 3}">{layer}</text>')
        edges = [3 + 97 * expert / widest for expert in range(len(counts) + 1)]
        for expert, ((begin, end), count) in enumerate(zip(pairwise(edges), counts, strict=True)):
            share = count / mean
            strength = min(1.0, (share - 1 if share > 1 else 1 / max(share, 0.1) - 1) / (_FULL - 1))
            parts.append(
                f'<rect x="{begin:.2f}%" y="{y}" width="{end - begin:.2f}%" height="{_ROW}" '
                f'fill="{AMBER if share > 1 else BLUE}" fill-opacity="{strength:.2f}">'
                f"<title>layer {layer}, expert {expert}: {share:.2f} of the mean</title></rect>"
            )
    first, last = recorded[0]["step"], recorded[-1]["step"]
    worst = max(loads, key=lambda layer: max(loads[layer]) / sum(loads[layer]) * len(loads[layer]))
    most = max(loads[worst]) / sum(loads[worst]) * len(loads[worst])
    title = f"Load of experts by layer, steps {first} to {last}"
    return [
        "<h2>Load of experts</h2>",
        f'<svg class="heat" role="img" width="100%" height="{len(loads) * _ROW}"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg>",
        f"<p class=note>A row is a layer, a column an expert, over the recorded steps {first} to {last}: amber has more"
        f" tokens than the mean of its layer, full at twice of it, blue fewer, full at half. The largest is {most:.2f} "
        f"of the mean, in layer {worst}.</p>",
    ]
