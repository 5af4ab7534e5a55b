"""A schedule that cannot run is refused in one sentence, with the nearest that can."""

from __future__ import annotations

import pytest

from manifests.errors import UsageError
from manifests.placement import Placement
from manifests.schedules import SCHEDULES, check_schedule
from tests.fast.schedules.torch_tables import placed

KNOWN = "known: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV"


@pytest.mark.parametrize("name", SCHEDULES)
def test_name_is_known_in_any_case(name: str) -> None:
    style = "v" if name in ("ZBVZeroBubble", "DualPipeV") else "loop"
    placement = placed(2, 1 if name in ("GPipe", "1F1B") else 2, style)  # type: ignore[arg-type]
    assert check_schedule(name.upper(), placement, 4) == check_schedule(name.lower(), placement, 4) == name


@pytest.mark.parametrize(
    ("name", "placement", "num_microbatches", "group", "message"),
    [
        ("ZBV", placed(2), 4, None, f"'ZBV' is not known\nhint: did you mean ZBVZeroBubble? {KNOWN}"),
        ("", placed(2), 4, None, f"'' is not known\nhint: {KNOWN}"),
        ("GPipe", placed(2), 0, None, "GPipe needs at least 1 microbatch, found 0"),
        (
            "GPipe",
            placed(4, 2),
            8,
            None,
            "GPipe needs 1 stage on each rank, found 2\nhint: take the schedule Interleaved1F1B, or the layout pp=4",
        ),
        (
            "1F1B",
            placed(4, 2, "v"),
            8,
            None,
            "1F1B needs 1 stage on each rank, found 2\nhint: take the schedule ZBVZeroBubble, or the layout pp=4",
        ),
        (
            "1F1B",
            placed(4),
            3,
            None,
            "1F1B needs at least 4 microbatches, one for each stage, found 3\n"
            "hint: take 4 microbatches or more, or the schedule GPipe",
        ),
        (
            "DualPipeV",
            placed(4, 2, "v"),
            7,
            None,
            "DualPipeV needs at least 8 microbatches, one for each stage, found 7\n"
            "hint: take 8 microbatches or more, or the schedule ZBVZeroBubble",
        ),
        (
            "ZBVZeroBubble",
            placed(4, 2),
            8,
            None,
            "ZBVZeroBubble needs 2 stages on each rank, placed in a v, found 2 placed in a loop\n"
            "hint: take the layout pp=4,vpp=2,style=v, or the schedule Interleaved1F1B or InterleavedZeroBubble",
        ),
        (
            "DualPipeV",
            placed(4),
            8,
            None,
            "DualPipeV needs 2 stages on each rank, placed in a v, found 1 placed in a loop\n"
            "hint: take the layout pp=4,vpp=2,style=v, or the schedule GPipe or 1F1B",
        ),
        (
            "LoopedBFS",
            placed(4),
            8,
            None,
            "LoopedBFS needs 2 stages or more on each rank, placed in a loop, found 1 placed in a loop\n"
            "hint: take the layout pp=4,vpp=2, or the schedule GPipe or 1F1B",
        ),
        (
            "InterleavedZeroBubble",
            placed(4, 2, "v"),
            8,
            None,
            "InterleavedZeroBubble needs 2 stages or more on each rank, placed in a loop, found 2 placed in a v\n"
            "hint: take the layout pp=4,vpp=2, or the schedule ZBVZeroBubble or DualPipeV",
        ),
        (
            "Interleaved1F1B",
            placed(4, 2),
            9,
            None,
            "Interleaved1F1B over 4 ranks runs microbatches in 2 rounds of equal size, found 9 microbatches\n"
            "hint: take 8 or 10 microbatches",
        ),
        (
            "InterleavedZeroBubble",
            placed(4, 2),
            14,
            None,
            "InterleavedZeroBubble over 4 ranks runs microbatches in 3 rounds of equal size, found 14 microbatches\n"
            "hint: take 12 or 15 microbatches",
        ),
        (
            "LoopedBFS",
            placed(2, 2),
            8,
            2,
            "LoopedBFS does not support groups of microbatches\nhint: leave the group out, or take Interleaved1F1B",
        ),
        (
            "Interleaved1F1B",
            placed(4, 2),
            3,
            4,
            "groups need at least 4 microbatches, one for each rank, found 3\nhint: take 4 microbatches or more",
        ),
        (
            "Interleaved1F1B",
            placed(2, 2),
            7,
            3,
            "a group of microbatches takes 2 (ranks) to 7 (microbatches) and leaves none or at least 2 for the last "
            "group, found 3\nhint: take a group of 4 or 5",
        ),
        (
            "Interleaved1F1B",
            placed(2, 2),
            7,
            0,
            "a group of microbatches takes 2 (ranks) to 7 (microbatches) and leaves none or at least 2 for the last "
            "group, found 0\nhint: take a group of 4 or 5",
        ),
    ],
)
def test_schedule_that_cannot_run_is_refused_with_the_nearest_that_can(
    name: str, placement: Placement, num_microbatches: int, group: int | None, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        check_schedule(name, placement, num_microbatches, microbatch_group=group)
    assert str(refused.value) == f"--schedule: {message}"


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
