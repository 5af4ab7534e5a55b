"""What the ranks of test_compute run: a schedule, a way to compute, and how near the gradients must be."""

from __future__ import annotations

from dataclasses import dataclass

from manifests.placement import Placement
from manifests.schedules.rules import SCHEDULES, ScheduleName
from runner.config.schema import BatchOptions, ComputeOptions

STEPS = 3
BATCH = BatchOptions(global_batch=8, microbatch=1, seq_len=16)
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to compute on one schedule. `tolerance` is relative, of every gradient's norm; 0: the same bits."""

    schedule: ScheduleName
    name: str
    options: ComputeOptions
    tolerance: float = 0.0

    @property
    def placement(self) -> Placement:
        per_rank = 1 if self.schedule in ("GPipe", "1F1B") else 2
        is_v = self.schedule in ("ZBVZeroBubble", "DualPipeV")
        return Placement(num_stages=2 * per_rank, num_ranks=2, style="v" if is_v else "loop")

    def __str__(self) -> str:
        return f"{self.schedule}-{self.name}"


def ways_on(schedule: ScheduleName) -> tuple[Case, ...]:
    is_split = schedule in SPLIT
    return (
        Case(schedule=schedule, name="full", options=ComputeOptions(recompute="full")),
        Case(schedule=schedule, name="every-2", options=ComputeOptions(recompute=2)),
        Case(schedule=schedule, name="selective", options=ComputeOptions(recompute="selective")),
        Case(schedule=schedule, name="loss-chunk", options=ComputeOptions(loss_chunk=5), tolerance=1e-6),
        # Against one process, which adds the microbatches' gradients up in the order of their numbers.
        Case(
            schedule=schedule,
            name="mixed",
            options=ComputeOptions(dtype="bf16", master_dtype="fp32"),
            tolerance=1e-6 if is_split or schedule == "LoopedBFS" else 0.0,
        ),
    )


ALL = tuple(case for schedule in SCHEDULES for case in ways_on(schedule))
SPANNING = tuple(
    case
    for case in ALL
    if case.schedule in ("1F1B", "ZBVZeroBubble")
    or (case.name == "full" and case.schedule in ("InterleavedZeroBubble", "DualPipeV"))
)
REST = tuple(case for case in ALL if case not in SPANNING)
COMPILED = tuple(
    Case(
        schedule=schedule,
        name=f"compiled-{recompute}",
        options=ComputeOptions(is_compiled=True, recompute=recompute),
        tolerance=5e-6,
    )
    for schedule, recompute in (("1F1B", "none"), ("Interleaved1F1B", "full"), ("1F1B", "selective"))
)
