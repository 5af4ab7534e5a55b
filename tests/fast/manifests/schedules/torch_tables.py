"""What torch.distributed.pipelining makes of a schedule, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime, get_schedule_class

from manifests.placement import Placement, Style
from manifests.schedules.actions import LoweredTable, Table

SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")

Rows = list[list[str]]  # of each rank, each step as torch spells it


def placed(num_ranks: int, num_virtual: int = 1, style: Style = "loop") -> Placement:
    return Placement(num_stages=num_ranks * num_virtual, num_ranks=num_ranks, style=style)


def placements_of(name: str, num_ranks: int) -> list[Placement]:
    if name in SINGLE:
        return [placed(num_ranks)]
    if name in V_SHAPED:
        return [placed(num_ranks, 2, "v")]
    return [placed(num_ranks, 2), placed(num_ranks, 3)]


def rows_of(table: Table | LoweredTable) -> Rows:
    return [[str(step) for step in steps] for steps in table.ranks]


def text_with_waits(table: LoweredTable) -> str:
    """Give a table as torch 2.15 reads it, with a wait for each reduction at once and for each send at the end."""
    rows = []
    for row in rows_of(table):
        steps = [found for step in row for found in (step, step.replace("REDUCE_", "WAIT_REDUCE_"))]
        reduced = [step for position, step in enumerate(steps) if position % 2 == 0 or "WAIT_" in step]
        rows.append([*reduced, *(step.replace("SEND_", "WAIT_SEND_") for step in row if "SEND_" in step)])
    return "".join(",".join(row) + "\n" for row in rows)


def torch_schedule(name: str, placement: Placement, num_microbatches: int) -> Any:
    """Give torch's schedule, which reads of its stages no more than how many there are and where."""
    stages = torch_stages(placement)
    return get_schedule_class(name)(stages[0] if name in SINGLE else stages, num_microbatches)


def torch_stages(placement: Placement) -> list[Any]:
    stage = {"num_stages": placement.num_stages, "group_size": placement.num_ranks, "group_rank": 0, "submod": None}
    return [SimpleNamespace(**stage) for _ in range(placement.num_virtual)]


def torch_runtime(placement: Placement, num_microbatches: int, **options: bool) -> Any:
    return _PipelineScheduleRuntime(torch_stages(placement), num_microbatches, **options)  # type: ignore[no-untyped-call]


def compute_rows(order: dict[int, list[_Action | None]]) -> Rows:
    """Give torch's table without idle time and the reductions it adds to single-stage schedules."""
    kept = [
        [action for action in order[rank] if action is not None and "REDUCE_GRAD" not in action.computation_type.value]
        for rank in sorted(order)
    ]
    return [[str(action) for action in actions] for actions in kept]


class RecordingStage:
    """A stage that writes down what torch's schedule asks of it."""

    is_first = is_last = False
    has_backward = True

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.done: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_args: Any, **_kwargs: Any) -> None:
        self.done.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_kwargs: Any) -> None:
        self.done.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, _factor: int) -> None: ...

    def release_fwd_send_outputs(self, _microbatch: int) -> None: ...

    def no_transfers(self, _microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers


def executed_rows(name: str, num_ranks: int, num_microbatches: int) -> Rows:
    """Give what the step of a single-stage schedule really runs on each rank."""
    stages = [RecordingStage(rank, num_ranks) for rank in range(num_ranks)]
    for stage in stages:
        schedule: Any = get_schedule_class(name)(stage, num_microbatches)
        schedule._stage_forward_initialized = True  # there are no processes to agree on shapes with
        schedule._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
    return [stage.done for stage in stages]
