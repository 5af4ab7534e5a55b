"""What is drawn of a step: all of it, or, of many microbatches, warm-up and drain with a little of the steady state."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from manifests.schedules import Action, Timeline

_KEPT = 2  # microbatches of the steady state on either side of the cut
_LEAST_CUT = 4  # microbatches
_GAP = 0.03  # of what is drawn
_START, _END = attrgetter("start_s"), attrgetter("end_s")


class Box(NamedTuple):
    """An action of a rank, or the part of it that is drawn, in seconds from the left edge."""

    rank: int
    action: Action
    left: float
    right: float


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The seconds of a step that are drawn: those up to `head_s` and those from `tail_s`, `gap_s` apart."""

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
        """Yield what is drawn of every action, rank by rank."""
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
    each_s = max(timeline.busy_s) / num_microbatches
    # In between, every rank runs forwards and backwards.
    head_s, tail_s = max(starts_s) + _KEPT * each_s, min(ends_s) - _KEPT * each_s
    if tail_s - head_s < _LEAST_CUT * each_s:
        return whole
    shown_s = head_s + end_s - tail_s
    num_cut = round((tail_s - head_s) / each_s)
    return View(head_s=head_s, tail_s=tail_s, end_s=end_s, gap_s=_GAP * shown_s, num_cut=num_cut)
