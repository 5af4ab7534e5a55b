"""Tables are the ones torch runs, and Megatron's where torch has no groups; pictures show every action at its time."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from manifests.errors import UsageError
from manifests.placement import Placement
from manifests.schedules.actions import Action, actions_of
from manifests.schedules.picture import action_color, pipeline_svg, view_of
from manifests.schedules.rules import SCHEDULES
from manifests.schedules.simulation import StageCosts, simulate
from manifests.schedules.tables import schedule_table
from tests.fast.manifests.schedules.torch_tables import (
    SINGLE,
    compute_rows,
    executed_rows,
    placed,
    placements_of,
    rows_of,
    torch_schedule,
)


def torch_rows(name: str, placement: Placement, num_microbatches: int) -> list[list[str]] | None:
    """Give torch's table, or None where torch refuses."""
    try:
        return compute_rows(torch_schedule(name, placement, num_microbatches).pipeline_order)
    except ValueError:
        return None


def our_rows(name: str, placement: Placement, num_microbatches: int) -> list[list[str]] | None:
    try:
        return rows_of(schedule_table(name, placement, num_microbatches))
    except UsageError:
        return None


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "1F1B"])
def test_table_equals_torchs_and_is_refused_where_torch_refuses(name: str) -> None:
    num_tables = 0
    for num_ranks in (1, 2, 3, 4, 5, 8):
        for placement in placements_of(name, num_ranks):
            for num_microbatches in (*range(1, 21), 24, 31, 32):
                expected = torch_rows(name, placement, num_microbatches)
                assert our_rows(name, placement, num_microbatches) == expected, (placement, num_microbatches)
                num_tables += expected is not None
    assert num_tables >= 90


def megatron_1f1b(num_ranks: int, num_microbatches: int) -> list[list[str]]:
    """Megatron-Core, `forward_backward_pipelining_without_interleaving`."""
    rows = []
    for rank in range(num_ranks):
        num_warmup = min(num_ranks - rank - 1, num_microbatches)
        row = [f"{rank}F{number}" for number in range(num_warmup)]
        for number in range(num_microbatches - num_warmup):
            row += [f"{rank}F{number + num_warmup}", f"{rank}B{number}"]
        rows.append(row + [f"{rank}B{number}" for number in range(num_microbatches - num_warmup, num_microbatches)])
    return rows


@pytest.mark.parametrize("name", SINGLE)
def test_single_stage_table_is_what_torchs_step_executes(name: str) -> None:
    for num_ranks in (1, 2, 3, 4, 8):
        for num_microbatches in (1, 2, 3, 4, 7, 8, 9, 16):
            if name == "1F1B" and num_microbatches < num_ranks:
                assert torch_rows(name, placed(num_ranks), num_microbatches) is None
                assert our_rows(name, placed(num_ranks), num_microbatches) == megatron_1f1b(num_ranks, num_microbatches)
            else:
                expected = executed_rows(name, num_ranks, num_microbatches)
                assert our_rows(name, placed(num_ranks), num_microbatches) == expected


MEGATRON = schedule_table("Interleaved1F1B", placed(2, 2), 5, microbatch_group=3)


def actions_on(rank: int) -> list[Action]:
    return [action for step in MEGATRON.ranks[rank] for action in actions_of(step)]


def test_groups_of_three_deal_five_microbatches_as_megatron_documents() -> None:
    # Megatron-Core, pipeline_parallel/schedules.py, `get_schedule_table`: PP2 N3 M5 with VP2.
    for rank in range(2):
        forwards = [action for action in actions_on(rank) if action.kind == "F"]
        assert [action.microbatch for action in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
        assert [MEGATRON.placement.virtual_of(action.stage) for action in forwards] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
        backwards = [action for action in actions_on(rank) if action.kind == "B"]
        assert [action.microbatch for action in backwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
        assert [MEGATRON.placement.virtual_of(action.stage) for action in backwards] == [1, 1, 1, 0, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        # `convert_schedule_table_to_order`, same file: chunks from 1, backwards negative, 5 forwards of warm-up.
        (0, "1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1"),
        # The same by hand for 3 forwards of warm-up, (2 - 1 - 1) * 2 + (2 - 1) * 3.
        (1, "1 1 1 2 -2 2 -2 2 -2 1 -1 1 -1 2 -1 2 -2 -2 -1 -1"),
    ],
)
def test_groups_of_three_order_chunks_as_megatron_documents(rank: int, order: str) -> None:
    chunks = [1 + MEGATRON.placement.virtual_of(action.stage) for action in actions_on(rank)]
    signs = [1 if action.kind == "F" else -1 for action in actions_on(rank)]
    assert [chunk * sign for chunk, sign in zip(chunks, signs, strict=True)] == [int(item) for item in order.split()]


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "group"), [(2, 8, 2), (4, 12, 4), (4, 10, 5), (3, 5, 5)])
def test_group_that_torch_would_choose_gives_torchs_table(num_ranks: int, num_microbatches: int, group: int) -> None:
    table = schedule_table("Interleaved1F1B", placed(num_ranks, 2), num_microbatches, microbatch_group=group)
    assert rows_of(table) == torch_rows("Interleaved1F1B", placed(num_ranks, 2), num_microbatches)


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
