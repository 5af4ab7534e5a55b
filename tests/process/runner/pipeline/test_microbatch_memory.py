"""Memory of a step against its plan, by torch's allocator: it does not depend on the number of microbatches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from manifests.schedules.rules import SCHEDULES
from tests.process.runner.pipeline.peak_worker import CONFIG, SEQ_LEN
from tests.process.torchrun import launch

pytestmark = pytest.mark.timeout(900)

FEW, MORE, MANY = 6, 12, 18
BOUNDED = tuple(name for name in SCHEDULES if name not in ("GPipe", "LoopedBFS"))
HIDDEN_NBYTES = 4 * SEQ_LEN * int(CONFIG["hidden_size"])  # of what crosses between two stages
Measured = dict[tuple[str, int, str], list[dict[str, Any]]]


def measure(
    out: Path,
    num_ranks: int,
    schedules: Sequence[str],
    recompute: Sequence[str],
    shares: dict[int, list[int]],
    many: int = MANY,
) -> Measured:
    """Run every schedule with few and many microbatches; return the figures of each rank."""
    cases = [
        {
            "name": f"{schedule}-{count}-{layers}",
            "schedule": schedule,
            "num_microbatches": count,
            "recompute": layers,
            "shares": shares[1 if schedule in ("GPipe", "1F1B") else 2],
        }
        for schedule in schedules
        for layers in recompute
        for count in (FEW, many)
    ]
    (out / "cases.json").write_text(json.dumps(cases))
    launch(num_ranks, "runner/pipeline/peak_worker.py", out / "cases.json", out, timeout_s=800)
    return {
        (str(case["schedule"]), int(str(case["num_microbatches"])), str(case["recompute"])): [
            json.loads((out / f"{case['name']}-{rank}.json").read_text()) for rank in range(num_ranks)
        ]
        for case in cases
    }


def planned_nbytes(rank: dict[str, Any]) -> int:
    return sum(rank["planned"][part] for part in ("gradients", "activations", "receive_buffers", "temporary"))


def check(measured: Measured, tolerance: float) -> None:
    for (schedule, count, layers), ranks in measured.items():
        for number, rank in enumerate(ranks):
            case = (schedule, count, layers, number)
            few = measured[schedule, FEW, layers][number]
            assert rank["peak"] == pytest.approx(planned_nbytes(rank), rel=tolerance), case
            assert rank["evaluation_peak"] <= 1.02 * few["evaluation_peak"], case
            if schedule in BOUNDED:
                assert rank["planned"] == few["planned"], case
                assert rank["peak"] <= 1.02 * few["peak"], case


@pytest.mark.parametrize(
    ("schedules", "many"),
    [(["ZBVZeroBubble"], MORE), pytest.param(["Interleaved1F1B", "ZBVZeroBubble"], MANY, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_more_microbatches_need_no_more_memory_and_as_much_as_planned(
    schedules: Sequence[str], many: int, tmp_path: Path
) -> None:
    """Under zero bubble, what I recomputes is in memory until W."""
    check(measure(tmp_path, 2, schedules, ["full"], {2: [3, 3, 3, 2]}, many), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_every_schedule_needs_as_much_as_planned(tmp_path: Path, recompute: str) -> None:
    check(measure(tmp_path, 2, SCHEDULES, [recompute], {1: [5, 6], 2: [3, 3, 3, 2]}), 0.13)


@pytest.mark.slow
def test_rank_without_modules_has_just_the_tensors_that_cross_it(tmp_path: Path) -> None:
    """The second of three ranks computes nothing: all it allocates is received or in transit."""
    measured = measure(tmp_path, 3, SCHEDULES, ["none"], {1: [5, 0, 6], 2: [3, 0, 3, 2, 0, 3]})
    for case, ranks in measured.items():
        counts = ranks[1]["peak"] / HIDDEN_NBYTES, ranks[1]["planned"]["receive_buffers"] / HIDDEN_NBYTES
        if case[0] in ("1F1B", "Interleaved1F1B"):
            assert counts[0] == pytest.approx(counts[1], abs=0.1), case
        # Elsewhere some of what is in transit has arrived when most is received.
        assert counts[1] - 4.1 < counts[0] < counts[1] + 0.1, case
