"""Which pipeline rank runs which stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from manifests.placement import Placement, Style
from tests.refusals import refusal


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_ranks = draw(st.integers(1, 16))
    if draw(st.booleans()):
        return Placement(num_stages=2 * num_ranks, num_ranks=num_ranks, style="v")
    return Placement(num_stages=num_ranks * draw(st.integers(1, 8)), num_ranks=num_ranks)


@given(placements())
def test_every_stage_is_on_one_rank_and_every_rank_has_equally_many(placement: Placement) -> None:
    stages_of = [placement.stages_on(rank) for rank in range(placement.num_ranks)]
    assert sorted(stage for stages in stages_of for stage in stages) == list(range(placement.num_stages))
    assert {len(stages) for stages in stages_of} == {placement.num_virtual}
    for rank, stages in enumerate(stages_of):
        assert [placement.rank_of(stage) for stage in stages] == [rank] * len(stages)
        assert [placement.virtual_of(stage) for stage in stages] == list(range(len(stages)))


@given(placements())
def test_stages_sit_where_torchs_schedules_expect_them(placement: Placement) -> None:
    expected = generate_stage_to_rank_mapping(placement.num_ranks, placement.num_stages, placement.style)
    assert {stage: placement.rank_of(stage) for stage in range(placement.num_stages)} == expected


def test_loop_assigns_round_robin() -> None:
    placement = Placement(num_stages=6, num_ranks=2)
    assert [placement.stages_on(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]


def test_v_goes_down_and_comes_back() -> None:
    placement = Placement(num_stages=6, num_ranks=3, style="v")
    assert [placement.stages_on(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.parametrize(
    ("num_stages", "num_ranks", "style", "code"),
    [
        (0, 1, "loop", "layout.no-stages"),
        (4, 0, "loop", "layout.no-stages"),
        (5, 2, "loop", "layout.indivisible-stages"),
        (4, 4, "v", "layout.not-a-v"),
    ],
)
def test_impossible_placement_is_refused(
    num_stages: int, num_ranks: int, style: Style, code: str, wording: Callable[[str], None]
) -> None:
    error = refusal(lambda: Placement(num_stages=num_stages, num_ranks=num_ranks, style=style))
    assert (error.code, error.where) == (code, "layout")
    wording(str(error))
