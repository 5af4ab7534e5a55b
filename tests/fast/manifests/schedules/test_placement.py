"""Which pipeline rank runs which stage, and which schedules can run there, with the nearest that can as a hint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from manifests.errors import UsageError
from manifests.placement import Placement, Style
from manifests.schedules.rules import SCHEDULES, check_schedule
from tests.fast.manifests.schedules.torch_tables import placed
from tests.refusals import refusal


@pytest.mark.parametrize("name", SCHEDULES)
def test_name_is_known_in_any_case(name: str) -> None:
    style = "v" if name in ("ZBVZeroBubble", "DualPipeV") else "loop"
    placement = placed(2, 1 if name in ("GPipe", "1F1B") else 2, style)  # type: ignore[arg-type]
    assert check_schedule(name.upper(), placement, 4) == check_schedule(name.lower(), placement, 4) == name


@pytest.mark.parametrize(
    ("name", "placement", "num_microbatches", "group", "code"),
    [
        ("ZBV", placed(2), 4, None, "unknown"),
        ("", placed(2), 4, None, "unknown"),
        ("GPipe", placed(4, 2), 8, None, "other-placement"),
        ("1F1B", placed(4, 2, "v"), 8, None, "other-placement"),
        ("DualPipeV", placed(4, 2, "v"), 7, None, "too-few-microbatches"),
        ("ZBVZeroBubble", placed(4, 2), 8, None, "other-placement"),
        ("DualPipeV", placed(4), 8, None, "other-placement"),
        ("LoopedBFS", placed(4), 8, None, "other-placement"),
        ("InterleavedZeroBubble", placed(4, 2, "v"), 8, None, "other-placement"),
        ("Interleaved1F1B", placed(4, 2), 9, None, "uneven-rounds"),
        ("InterleavedZeroBubble", placed(4, 2), 14, None, "uneven-rounds"),
        ("LoopedBFS", placed(2, 2), 8, 2, "microbatch-group"),
        ("Interleaved1F1B", placed(4, 2), 3, 4, "too-few-microbatches"),
        ("Interleaved1F1B", placed(2, 2), 7, 3, "microbatch-group"),
        ("Interleaved1F1B", placed(2, 2), 7, 0, "microbatch-group"),
    ],
)
def test_schedule_that_cannot_run_is_refused_with_the_nearest_that_can(
    name: str, placement: Placement, num_microbatches: int, group: int | None, code: str, wording: Callable[[str], None]
) -> None:
    error = refusal(lambda: check_schedule(name, placement, num_microbatches, microbatch_group=group))
    assert (error.code, error.where) == (f"schedule.{code}", "--schedule" if group is None else "--microbatch-group")
    wording(str(error))


def test_group_takes_what_megatron_takes() -> None:
    """`forward_backward_pipelining_with_interleaving`: PP <= N <= M, and M % N is 0 or at least PP."""
    for num_ranks in range(1, 6):
        for num_microbatches in range(1, 14):
            for group in range(-1, 15):
                left = num_microbatches % group if group > 0 else 0
                expected = num_ranks <= group <= num_microbatches and (left == 0 or left >= num_ranks)
                try:
                    check_schedule("Interleaved1F1B", placed(num_ranks, 2), num_microbatches, microbatch_group=group)
                except UsageError:
                    assert not expected, (num_ranks, num_microbatches, group)
                else:
                    assert expected, (num_ranks, num_microbatches, group)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_ranks = draw(st.integers(1, 16))
    if draw(st.booleans()):
        return Placement(num_stages=2 * num_ranks, num_ranks=num_ranks, style="v")
    return Placement(num_stages=num_ranks * draw(st.integers(1, 8)), num_ranks=num_ranks)


@given(placements())
def test_stages_sit_where_torchs_schedules_expect_them(placement: Placement) -> None:
    expected = generate_stage_to_rank_mapping(placement.num_ranks, placement.num_stages, placement.style)
    assert {stage: placement.rank_of(stage) for stage in range(placement.num_stages)} == expected


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
