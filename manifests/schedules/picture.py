"""One training step as a picture: a row per rank, a box per action, blanks where a rank waits.

`pipeline_svg` writes the picture of a page. `reshard plan --draw` puts the boxes of a `View` on its sheet.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from operator import attrgetter
from typing import NamedTuple

from manifests.command.palette import THEMES, WORK_COLORS, ink_on, tint
from manifests.placement import Placement
from manifests.schedules.actions import Action
from manifests.schedules.simulation import TimedAction, Timeline

STYLE = f"""
:root {{ {THEMES["light"].css} }}
@media (prefers-color-scheme: dark) {{ :root {{ {THEMES["dark"].css} }} }}
svg text {{ font: 11px system-ui, sans-serif; fill: var(--quiet); pointer-events: none; }}
svg text.name {{ fill: var(--ink); font-weight: bold; }}
svg text.number {{ fill: currentColor; text-anchor: middle; }}
svg text.tick {{ paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }}
.wait {{ fill: var(--faint); }} .act {{ stroke: var(--paper); stroke-width: .5px; }}
.act.chosen {{ stroke: var(--ink); stroke-width: 2px; }}
"""

_LANES = (22, 10)  # pixels: the height of a rank's boxes in the first timeline, and in those below it
_NAME, _SPACE, _AXIS = 16, 12, 26  # pixels: a rank's name above its boxes, the space below them, and the time axis
_TEXT_SHARE = 1.6  # percent of the width that a digit takes, at most
_STEADY = 2  # microbatches of the steady state on either side of a cut
_LEAST_CUT = 4  # microbatches
_GAP = 0.03  # of the width
_START, _END = attrgetter("start_s"), attrgetter("end_s")


class Box(NamedTuple):
    """An action of a rank, or the visible part of it, in seconds from the left edge."""

    rank: int
    action: Action
    left: float
    right: float


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The visible seconds of a step: those up to `head_s` and those from `tail_s`, `gap_s` apart."""

    head_s: float
    tail_s: float
    end_s: float
    gap_s: float = 0.0
    num_cut: int = 0  # microbatches

    @property
    def width_s(self) -> float:
        return self.head_s + self.gap_s + self.end_s - self.tail_s

    def place(self, time_s: float) -> float:
        """Return where a time is drawn; what is cut is drawn in the gap."""
        if time_s <= self.head_s:
            return time_s
        return max(self.head_s, time_s - self.tail_s + self.head_s + self.gap_s)

    def boxes(self, timeline: Timeline) -> Iterator[Box]:
        """Yield the visible part of every action, rank by rank."""
        shift_s = self.head_s + self.gap_s - self.tail_s
        for rank, spans in enumerate(timeline.ranks):
            for action, start_s, end_s in spans[: bisect_left(spans, self.head_s, key=_START)]:
                if start_s < end_s:
                    yield Box(rank, action, start_s, min(end_s, self.head_s))
            for action, start_s, end_s in spans[bisect_right(spans, self.tail_s, key=_END) :]:
                if start_s < end_s:
                    yield Box(rank, action, max(start_s, self.tail_s) + shift_s, end_s + shift_s)


def view_of(timeline: Timeline, num_microbatches: int, most_s: float) -> View:
    """Return the whole step if it takes at most `most_s`; of a longer one, cut the steady state, if it has one."""
    end_s = timeline.makespan_s
    whole = View(head_s=end_s, tail_s=end_s, end_s=end_s)
    backwards = [next((span for span in spans if span.action.kind != "F"), None) for spans in timeline.ranks]
    forwards = [next((span for span in reversed(spans) if span.action.kind == "F"), None) for spans in timeline.ranks]
    starts_s = [first.start_s for first in backwards if first]
    ends_s = [last.end_s for last in forwards if last]
    if end_s <= most_s or len(starts_s) < len(backwards) or len(ends_s) < len(forwards):
        return whole
    microbatch_s = max(timeline.busy_s) / num_microbatches
    # In between, every rank runs forwards and backwards.
    head_s, tail_s = max(starts_s) + _STEADY * microbatch_s, min(ends_s) - _STEADY * microbatch_s
    if tail_s - head_s < _LEAST_CUT * microbatch_s:
        return whole
    num_cut = round((tail_s - head_s) / microbatch_s)
    return View(head_s=head_s, tail_s=tail_s, end_s=end_s, gap_s=_GAP * (head_s + end_s - tail_s), num_cut=num_cut)


def action_color(action: Action, placement: Placement) -> str:
    """Return the color of an action, paler for the later stages of its rank."""
    color = WORK_COLORS[action.kind][1]
    if placement.num_virtual == 1:
        return color
    return tint(color, 0.6 * placement.virtual_of(action.stage) / (placement.num_virtual - 1))


def legend_of(kinds: Collection[str], placement: Placement) -> list[tuple[str, str]]:
    """Return what the colors of actions of these kinds mean, as texts with their colors."""
    entries = [(name, color) for kind, (name, color) in WORK_COLORS.items() if kind in kinds]
    return entries + ([("paler: later virtual stages", "none")] if placement.num_virtual > 1 else [])


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers between two others, at most about `most` of them."""
    rough = (high - low) / most
    if not rough > 0:
        return [low]
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def pipeline_svg(
    title: str, timelines: Mapping[str, Timeline], placement: Placement, end_s: float, ranks: Sequence[int] = ()
) -> str:
    """Return a row per rank with its actions in each timeline, one below the other, on one time axis up to `end_s`.

    Places are in percent, so that text keeps its size on every screen; `page.js` of the report reads the data of boxes.
    `timelines` has a word for each, such as "ran" and "planned"; `ranks` are the numbers of the pipeline ranks in the
    job, by default their own.
    """
    heights = [_LANES[min(number, 1)] for number in range(len(timelines))]
    boxes_height = sum(heights) + 2 * (len(heights) - 1)
    row_height = _NAME + boxes_height + _SPACE
    parts = []
    for place, rank in enumerate(ranks or range(placement.num_ranks)):
        top = place * row_height + _NAME
        parts.append(f'<text class="name" x="2" y="{top - 4}">rank {rank}</text>')
        parts.append(f'<rect class="wait" x="0" width="100%" y="{top}" height="{boxes_height}"/>')
        for (word, timeline), height in zip(timelines.items(), heights, strict=True):
            lane = (top, height, word)
            spans = (span for span in timeline.ranks[place] if span.start_s < span.end_s)
            parts += [_svg_box(span, rank, placement, lane, end_s) for span in spans]
            top += height + 2
    height = placement.num_ranks * row_height + _AXIS
    parts += [
        f'<text class="tick time" x="{_percent(at / 1e3, end_s)}" y="{height - 8}" '
        f'text-anchor="{text_anchor(100 * at / 1e3 / end_s)}">{at:g} ms</text>'
        for at in ticks(0, end_s * 1e3, 8)
    ]
    description = f"{placement.num_ranks} ranks, {end_s * 1e3:.1f} ms; each rank's actions: {', '.join(timelines)}"
    return (
        f'<svg class="pipeline" role="img" tabindex="0" width="100%" height="{height}" data-end="{end_s:.9f}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def text_anchor(percent: float) -> str:
    """Return how to align a text at this place, so that it stays within the picture."""
    return "start" if percent < 2 else "end" if percent > 96 else "middle"


def _svg_box(span: TimedAction, rank: int, placement: Placement, lane: tuple[int, int, str], end_s: float) -> str:
    """Return a box with its description, and in the first lane with the microbatch if there may be space."""
    (stage, kind, microbatch), start_s, stop_s = span
    y, height, word = lane
    color, seconds = action_color(span.action, placement), stop_s - start_s
    tip = (
        f"rank {rank}, stage {stage}: {WORK_COLORS[kind][0]}, microbatch {microbatch}, "
        f"{word}: {seconds * 1e3:.2f} ms from {start_s * 1e3:.2f} ms"
    )
    box = (
        f'<rect class="act" x="{_percent(start_s, end_s)}" width="{_percent(seconds, end_s)}" y="{y}" '
        f'height="{height}" fill="{color}" data-rank="{rank}" data-b="{start_s:.9f}" data-e="{stop_s:.9f}">'
        f"<title>{tip}</title></rect>"
    )
    if height < _LANES[0] or kind == "L":
        return box
    is_narrow = 100 * seconds / end_s < _TEXT_SHARE * len(str(microbatch))
    visibility = ' visibility="hidden"' if is_narrow else ""
    return (
        f'{box}<text class="number" x="{_percent((start_s + stop_s) / 2, end_s)}" y="{y + height / 2 + 4:g}" '
        f'style="color: {ink_on(color)}"{visibility}>{microbatch}</text>'
    )


def _percent(seconds: float, end_s: float) -> str:
    return f"{100 * seconds / end_s:.4f}%" if end_s else "0%"
