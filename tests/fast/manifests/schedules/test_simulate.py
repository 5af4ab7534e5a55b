"""Tables run against the clock: closed forms, tables by hand, and dependencies checked by other means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import UsageError
from manifests.placement import Placement
from manifests.schedules.actions import Action, ComputeKind, Overlap, Step, Table, actions_of
from manifests.schedules.liveness import in_flight, peak_held, peak_held_by_stage, peak_received
from manifests.schedules.lowering import lower
from manifests.schedules.rules import SCHEDULES
from manifests.schedules.simulation import StageCosts, Timeline, simulate
from manifests.schedules.tables import schedule_table
from tests.fast.manifests.schedules.torch_tables import LOOPED, SINGLE, V_SHAPED, placed, placements_of
from tests.refusals import refusal
from tests.steps import steps_of


def uniform(
    placement: Placement, forward_s: float = 1, input_s: float = 1, weight_s: float = 1, **hop: float
) -> StageCosts:
    num_stages = placement.num_stages
    return StageCosts(
        forward_s=(forward_s,) * num_stages, input_s=(input_s,) * num_stages, weight_s=(weight_s,) * num_stages, **hop
    )


def run(name: str, placement: Placement, num_microbatches: int) -> Timeline:
    return simulate(schedule_table(name, placement, num_microbatches), uniform(placement))


def table_of(placement: Placement, num_microbatches: int, *rows: str) -> Table:
    """Give a table from rows such as "0F0 1F0 1B0 0B0"; "0F1+1B0" overlaps."""

    def action(text: str) -> Action:
        kind: ComputeKind = next(kind for kind in ("F", "B", "I", "W") if kind in text)
        stage, _, microbatch = text.partition(kind)
        return Action(stage=int(stage), kind=kind, microbatch=int(microbatch))

    def step(text: str) -> Step:
        first, _, second = text.partition("+")
        return Overlap(forward=action(first), backward=action(second)) if second else action(first)

    ranks = tuple(tuple(step(text) for text in row.split()) for row in rows)
    return Table(placement=placement, num_microbatches=num_microbatches, ranks=ranks)


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (1, 5), (2, 2), (4, 4), (4, 16), (8, 9)])
def test_bubble_of_gpipe_and_1f1b_is_the_closed_form(name: str, num_ranks: int, num_microbatches: int) -> None:
    found = run(name, placed(num_ranks), num_microbatches)
    assert found.bubble == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1), abs=1e-12)
    assert found.makespan_s == 3 * (num_microbatches + num_ranks - 1)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize("num_virtual", [2, 3, 4])
@pytest.mark.parametrize(("num_ranks", "num_rounds"), [(1, 2), (2, 1), (2, 4), (4, 1), (4, 3), (8, 2)])
def test_bubble_of_looped_schedules_is_the_closed_form(
    name: str, num_virtual: int, num_ranks: int, num_rounds: int
) -> None:
    num_microbatches = num_ranks * num_rounds
    found = run(name, placed(num_ranks, num_virtual), num_microbatches)
    expected = (num_ranks - 1) / (num_virtual * num_microbatches + num_ranks - 1)
    assert found.bubble == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_zbv_waits_for_the_first_microbatch_alone_where_f_i_and_w_take_equally_long(num_ranks: int) -> None:
    """Zero Bubble, section 6: no bubble but the ramp of P - 1 forwards; a rank's part takes 6 M."""
    for num_microbatches in (2 * num_ranks, 2 * num_ranks + 3, 5 * num_ranks):
        found = run("ZBVZeroBubble", placed(num_ranks, 2, "v"), num_microbatches)
        assert found.makespan_s == 6 * num_microbatches + num_ranks - 1


@pytest.mark.parametrize(
    ("name", "placement", "expected"),
    [
        ("GPipe", placed(4), (8, 8, 8, 8)),
        ("1F1B", placed(4), (4, 3, 2, 1)),
        # Warm-up forwards (V - 1) * P + 2 * (P - 1 - r), and the first of the forwards that alternate.
        ("Interleaved1F1B", placed(4, 2), (11, 9, 7, 5)),
        ("LoopedBFS", placed(4, 2), (16, 16, 16, 16)),
        # Zero Bubble, section 6: as much as 1F1B, here in half stages.
        ("ZBVZeroBubble", placed(4, 2, "v"), (8, 8, 8, 8)),
        # deepseek-ai/DualPipe, README: 2 PP + 1 at most, in half stages as well.
        ("DualPipeV", placed(4, 2, "v"), (9, 9, 9, 9)),
    ],
)
def test_peak_counts_microbatches_in_flight(name: str, placement: Placement, expected: tuple[int, ...]) -> None:
    table = schedule_table(name, placement, 8)
    assert peak_held(table, [1] * placement.num_stages) == expected
    if placement.num_virtual == 1:
        assert in_flight(table) == expected


def test_peak_held_weighs_stages_and_keeps_a_microbatch_until_its_w() -> None:
    table = table_of(placed(1, 2), 2, "0F0 1F0 1I0 0I0 0F1 1W0 0W0 1F1 1B1 0B1")
    assert peak_held(table, (10, 1)) == (21,)
    assert peak_held(table, (10, 1), (5, 100)) == (126,)  # more from I to W
    assert peak_held(table, (10, 1), None, ((0, 0), (50, 50))) == (71,)  # where both are held
    assert peak_held(table, (10, 1), None, ((2, 2), (3, 3))) == (24,)
    assert peak_held(table, (10, 1), None, ((0, 0), (50, 0))) == (61,)  # during its B
    assert peak_held_by_stage(table, (10, 1), (5, 100)) == (25, 101)
    assert in_flight(table) == (2, 1)


@pytest.mark.parametrize("num_microbatches", [8, 64])
@pytest.mark.parametrize(
    ("name", "placement", "expected"),
    [
        # The input of one microbatch more than are in flight, and the gradient that is being used.
        ("1F1B", placed(4), (1, 5, 4, 2)),
        ("Interleaved1F1B", placed(4, 2), (5, 11, 9, 8)),
        ("InterleavedZeroBubble", placed(4, 2), (5, 11, 12, 13)),
        ("ZBVZeroBubble", placed(4, 2, "v"), (3, 11, 12, 7)),
        ("DualPipeV", placed(4, 2, "v"), (3, 12, 12, 6)),
    ],
)
def test_peak_received_does_not_depend_on_the_number_of_microbatches(
    name: str, placement: Placement, expected: tuple[int, ...], num_microbatches: int
) -> None:
    table = schedule_table(name, placement, num_microbatches)
    assert peak_received(lower(table)).ranks == expected


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[Table, StageCosts]:
    name = draw(st.sampled_from(SCHEDULES))
    placement = draw(st.sampled_from(placements_of(name, draw(st.integers(1, 5)))))
    num_microbatches, num_stages = draw(st.integers(1, 14)), placement.num_stages
    group = draw(st.none() | st.integers(1, 6)) if name == "Interleaved1F1B" else None
    seconds = st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages).map(tuple)
    costs = StageCosts(
        forward_s=draw(seconds), input_s=draw(seconds), weight_s=draw(seconds), hop_s=draw(st.integers(0, 3))
    )
    try:
        return schedule_table(name, placement, num_microbatches, microbatch_group=group), costs
    except UsageError:
        return schedule_table(name, placement, 2 * num_stages, microbatch_group=None), costs


@given(scheduled())
@settings(max_examples=150)
def test_every_action_starts_as_soon_as_it_may_and_no_sooner(case: tuple[Table, StageCosts]) -> None:
    table, costs = case
    found = simulate(table, costs)
    last = table.placement.num_stages - 1
    # When each action's result is there for other ranks: overlapped ones give it up together.
    ends = {str(span.action): span.end_s for spans in found.ranks for span in spans}
    left = dict(ends)
    for step in (step for steps in table.ranks for step in steps):
        for action in actions_of(step):
            left[str(action)] = ends[str(actions_of(step)[-1])]
    for rank, spans in enumerate(found.ranks):
        assert [span.action for span in spans] == [action for step in table.ranks[rank] for action in actions_of(step)]
        free_s = 0.0
        for span in spans:
            stage, kind, microbatch = span.action.stage, span.action.kind, span.action.microbatch
            earlier = {str(other.action) for other in spans if other.end_s <= span.start_s}
            if kind in "BI":
                assert f"{stage}F{microbatch}" in earlier
            if kind == "W":
                assert f"{stage}I{microbatch}" in earlier
            needed = {}
            if kind == "F" and stage > 0:
                needed = {stage - 1: [f"{stage - 1}F{microbatch}"]}
            if kind in "BI" and stage < last:
                needed = {stage + 1: [f"{stage + 1}B{microbatch}", f"{stage + 1}I{microbatch}"]}
            ready_s = 0.0
            for neighbour, results in needed.items():
                hop_s = costs.hop_s if table.placement.rank_of(neighbour) != rank else 0
                (ready_s,) = (left[result] + hop_s for result in results if result in left)
            assert span.start_s == max(free_s, ready_s)
            free_s = span.end_s


@given(scheduled())
def test_every_stage_computes_every_microbatch_once_and_all_time_is_accounted_for(
    case: tuple[Table, StageCosts],
) -> None:
    table, costs = case
    found = simulate(table, costs)
    counts = Counter((span.action.stage, span.action.kind) for spans in found.ranks for span in spans)
    for stage in range(table.placement.num_stages):
        whole, split = counts[stage, "B"], counts[stage, "I"]
        assert counts[stage, "F"] == whole + split == table.num_microbatches
        assert counts[stage, "W"] == split
    for rank in range(table.placement.num_ranks):
        stages = table.placement.stages_on(rank)
        one = sum(costs.forward_s[stage] + costs.input_s[stage] + costs.weight_s[stage] for stage in stages)
        assert found.busy_s[rank] == one * table.num_microbatches
    if found.makespan_s:
        total = Fraction(found.makespan_s) * len(found.ranks)
        assert found.bubble == pytest.approx(float(1 - sum(map(Fraction, found.busy_s)) / total), abs=1e-12)
    else:
        assert found.bubble == 0


@pytest.mark.parametrize(
    "rows",
    [
        ("0F0 2F0 0B0 2B0 0F1 2F1 2B1 0B1", "1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1"),
        ("0F0 2F0 2B0 0B0", "1F0 3B0 3F0 1B0"),
        ("0F0 2F0 2B0 0B0", "3F0 3B0 1B0"),
    ],
    ids=["cycle", "own-order", "never-computed"],
)
def test_deadlock_is_refused_with_what_each_rank_waits_for(
    rows: tuple[str, ...], wording: Callable[[str], None]
) -> None:
    placement = placed(2, 2)
    error = refusal(lambda: simulate(table_of(placement, 2, *rows), uniform(placement)))
    assert (error.code, error.where) == ("schedule.deadlock", "schedule")
    wording(str(error))


def test_negative_or_infinite_costs_are_refused(wording: Callable[[str], None]) -> None:
    errors = [
        refusal(partial(StageCosts, forward_s=(1,), input_s=(1,), weight_s=(1,), whole_s=(seconds,)))
        for seconds in (-1.0, float("nan"), float("inf"))
    ]
    assert {(error.code, error.where) for error in errors} == {("schedule.invalid-costs", "costs")}
    wording(str(errors[0]))


def test_costs_of_whole_backwards_leave_the_first_stages_to_w() -> None:
    """As torch does (`backward_one_chunk`, stage.py): the first stage does not send gradients."""
    assert StageCosts.of([1, 1, 1], [2, 2, 4], input_share=0.25, hop_s=3) == StageCosts(
        forward_s=(1, 1, 1), input_s=(0, 0.5, 1), weight_s=(2, 1.5, 3), hop_s=3
    )


def test_backwards_in_two_parts_take_longer_by_what_is_given() -> None:
    costs = StageCosts.of([1, 1], [2, 4], split_s=[1, 2]).by_kind()
    assert costs == {"F": (1, 1), "I": (0, 3), "W": (2, 3), "B": (2, 4)}
    assert StageCosts.of([1, 1], [2, 4]).by_kind() == {"F": (1, 1), "I": (0, 2), "W": (2, 2), "B": (2, 4)}


@pytest.mark.parametrize("name", [*LOOPED, *V_SHAPED])
def test_deepseek_v3_on_16_ranks_is_simulated_in_few_steps_an_action(name: str) -> None:
    placement = placed(16, 2, "v" if name in V_SHAPED else "loop")
    table, costs = schedule_table(name, placement, 128), uniform(placement)
    num_actions = sum(len(actions) for actions in table.ranks)
    assert steps_of(lambda: simulate(table, costs)) < 70 * num_actions  # DualPipeV runs two in one
