"""Pictures of a step: every action at its time, and the steady state of a long step cut."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from manifests.placement import Placement
from manifests.schedules import StageCosts, schedule_table, simulate
from manifests.schedules.picture import action_color, pipeline_svg, view_of


@pytest.mark.parametrize(("schedule", "num_stages", "style"), [("1F1B", 2, "loop"), ("ZBVZeroBubble", 4, "v")])
def test_boxes_of_page_and_sheet_are_at_the_same_places_in_the_same_colors(
    schedule: str, num_stages: int, style: str
) -> None:
    placement = Placement(num_stages=num_stages, num_ranks=2, style=style)  # type: ignore[arg-type]
    costs = StageCosts.of((1.0,) * num_stages, (2.0,) * num_stages)
    timeline = simulate(schedule_table(schedule, placement, 4), costs)
    end_s = timeline.makespan_s
    root = ElementTree.fromstring(pipeline_svg("a step", {"planned": timeline}, placement, end_s))
    drawn = sorted(
        (int(box.attrib["data-rank"]), float(box.attrib["x"][:-1]), float(box.attrib["width"][:-1]), box.attrib["fill"])
        for box in root.iter("rect")
        if box.get("class") == "act"
    )
    boxes = sorted(
        (box.rank, 100 * box.left / end_s, 100 * (box.right - box.left) / end_s, action_color(box.action, placement))
        for box in view_of(timeline, 4, end_s).boxes(timeline)
    )
    assert len(drawn) == sum(span.start_s < span.end_s for spans in timeline.ranks for span in spans)
    for rect, box in zip(drawn, boxes, strict=True):
        assert rect == (box[0], pytest.approx(box[1], abs=1e-4), pytest.approx(box[2], abs=1e-4), box[3])


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_many_microbatches_are_drawn_as_warm_up_a_little_steady_state_and_drain(schedule: str) -> None:
    placement = Placement(num_stages=4, num_ranks=4, style="loop")
    timeline = simulate(schedule_table(schedule, placement, 64), StageCosts.of((1.0,) * 4, (2.0,) * 4))
    view = view_of(timeline, 64, timeline.makespan_s / 2)
    boxes = list(view.boxes(timeline))
    drawn = {(box.rank, box.action) for box in boxes}
    all_of = {(rank, span.action) for rank, spans in enumerate(timeline.ranks) for span in spans}
    if schedule == "GPipe":  # no steady state, in which all ranks run both
        assert (view.num_cut, drawn) == (0, all_of)
        return
    assert view.num_cut > 40
    assert {box.action.microbatch for box in boxes} < set(range(64))
    warm_up = {(rank, span.action) for rank, spans in enumerate(timeline.ranks) for span in spans[:4]}
    drain = {(rank, span.action) for rank, spans in enumerate(timeline.ranks) for span in spans[-4:]}
    assert warm_up | drain <= drawn
    for box in boxes:
        assert 0 <= box.left < box.right <= view.width_s + 1e-9
        assert not view.head_s + 1e-9 < box.right < view.head_s + view.gap_s
    assert view_of(timeline, 64, timeline.makespan_s).num_cut == 0
