"""What is drawn of a step: all of it, or, of many microbatches, warm-up and drain with a little of the steady state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from manifests.schedules import Action, Timeline

__all__ = ["Box", "View", "view_of"]

_KEPT = 2  # microbatches of the steady state on either side of the cut
_LEAST_CUT = 4  # microbatches
_GAP = 0.03  # of what is drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
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
        for rank, spans in enumerate(timeline.ranks):
            for span in spans:
                for first, last in ((0.0, self.head_s), (self.tail_s, self.end_s)):
                    start, end = max(span.start_s, first), min(span.end_s, last)
                    if end > start:
                        yield Box(rank=rank, action=span.action, left=self.place(start), right=self.place(end))


def view_of(timeline: Timeline, num_microbatches: int, most_s: float) -> View:
    """Return the whole step if it takes at most `most_s`; of a longer one, cut the steady state, if it has one."""
    end_s = timeline.makespan_s
    whole = View(head_s=end_s, tail_s=end_s, end_s=end_s)
    starts = [[span.start_s for span in spans if span.action.kind != "F"] for spans in timeline.ranks]
    ends = [[span.end_s for span in spans if span.action.kind == "F"] for spans in timeline.ranks]
    if end_s <= most_s or not all(starts) or not all(ends):
        return whole
    each_s = max(timeline.busy_s) / num_microbatches
    # In between, every rank runs forwards and backwards.
    head_s, tail_s = (max(map(min, starts)) + _KEPT * each_s, min(map(max, ends)) - _KEPT * each_s)
    if tail_s - head_s < _LEAST_CUT * each_s:
        return whole
    shown_s = head_s + end_s - tail_s
    num_cut = round((tail_s - head_s) / each_s)
    return View(head_s=head_s, tail_s=tail_s, end_s=end_s, gap_s=_GAP * shown_s, num_cut=num_cut)
