"""What the parity ranks run, and the options that the references repeat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from manifests.placement import Placement
from manifests.schedules import SCHEDULES, ScheduleName, actions_of, schedule_table
from runner.batches import Batch
from runner.recipe import BatchOptions, OptimOptions
from tests.fast.runner.tiny import padded_batch

STEPS = 10
SEQ_LEN = 32
BATCH = BatchOptions(global_batch=8, microbatch=1, seq_len=SEQ_LEN)
# The first norms are above 1: every step is clipped.
OPTIM = OptimOptions(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_norm=0.5)
TEXT = BatchOptions(global_batch=3, microbatch=1, seq_len=19)  # of another shape than all training

Family = Literal["llama"]
Weights = Literal["untied", "tied"]
Plant = Literal[
    "scale_grads",
    "mean_per_microbatch",
    "tie_not_summed",
    "tie_counted_twice",
    "tie_stepped_twice",
    "stale_shapes",
    "defer_pp_recv",
    "losses_out_of_order",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training run. `shares` are each stage's number of modules; none means as even as possible."""

    schedule: ScheduleName
    num_ranks: int
    family: Family = "llama"
    weights: Weights = "untied"
    num_virtual: int = 0  # 0: as few as the schedule takes
    shares: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    plant: Plant | None = None  # a known mistake
    is_csv: bool = False  # the schedule, read from a file
    microbatch: int = 1

    @property
    def name(self) -> str:
        parts = [self.family, self.schedule, f"pp{self.num_ranks}", f"vpp{self.placement.num_virtual}", self.weights]
        parts += ["-".join(map(str, self.shares))] if self.shares else []
        parts += ["bf16"] if self.dtype == torch.bfloat16 else []
        parts += ["csv"] if self.is_csv else []
        return "_".join([*parts, self.plant] if self.plant else parts)

    @property
    def placement(self) -> Placement:
        is_v = self.schedule in ("ZBVZeroBubble", "DualPipeV")
        per_rank = self.num_virtual or (1 if self.schedule in ("GPipe", "1F1B") else 2)
        return Placement(num_stages=self.num_ranks * per_rank, num_ranks=self.num_ranks, style="v" if is_v else "loop")

    @property
    def order(self) -> tuple[int, ...]:
        """The order in which each stage adds the gradients of its microbatches."""
        if self.num_ranks == 1:
            return tuple(range(BATCH.num_microbatches))
        steps = schedule_table(self.schedule, self.placement, BATCH.num_microbatches).ranks[0]
        actions = (action for step in steps for action in actions_of(step))
        return tuple(action.microbatch for action in actions if action.stage == 0 and action.kind in "BW")


def cut_of(step: int) -> BatchOptions:
    """Give the shape of a step's batch: every third is shorter."""
    return replace(BATCH, seq_len=20) if step % 3 == 1 else BATCH


def batch_of(step: int) -> Batch:
    cut = cut_of(step)
    return padded_batch(step, size=cut.global_batch, seq_len=cut.seq_len)


def cut_modules(modules: tuple[str, ...], shares: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    ends = [sum(shares[: stage + 1]) for stage in range(len(shares))]
    return tuple(modules[end - share : end] for end, share in zip(ends, shares, strict=True))


FAMILIES: tuple[Family, ...] = get_args(Family)
_WEIGHTS: tuple[Weights, ...] = get_args(Weights)

MATRIX = tuple(
    Case(schedule=schedule, num_ranks=ranks, family=family, weights=weights)
    for family in FAMILIES
    for ranks in (1, 2, 4)
    for schedule in SCHEDULES
    for weights in _WEIGHTS
)
# 11 modules: embedding, 8 layers, norm, head.
UNEVEN = (
    Case(schedule="1F1B", num_ranks=4, weights="tied", shares=(5, 0, 5, 1)),
    Case(schedule="GPipe", num_ranks=4, weights="tied", shares=(1, 10, 0, 0)),
    Case(schedule="1F1B", num_ranks=4, shares=(0, 0, 6, 5)),
    Case(schedule="Interleaved1F1B", num_ranks=2, num_virtual=3, weights="tied", shares=(1, 0, 4, 3, 2, 1)),
    Case(schedule="InterleavedZeroBubble", num_ranks=3, weights="tied"),
    Case(schedule="DualPipeV", num_ranks=3, weights="tied"),
)
# One case for each schedule on two ranks and on four, each placement tied and untied.
SPANNING = (
    Case(schedule="GPipe", num_ranks=1, weights="tied"),
    Case(schedule="ZBVZeroBubble", num_ranks=1),
    Case(schedule="GPipe", num_ranks=2),
    Case(schedule="1F1B", num_ranks=2, weights="tied"),
    Case(schedule="Interleaved1F1B", num_ranks=2, weights="tied"),
    Case(schedule="LoopedBFS", num_ranks=2, weights="tied"),
    Case(schedule="InterleavedZeroBubble", num_ranks=2),
    Case(schedule="ZBVZeroBubble", num_ranks=2, weights="tied"),
    Case(schedule="DualPipeV", num_ranks=2),
    Case(schedule="1F1B", num_ranks=4),
    Case(schedule="InterleavedZeroBubble", num_ranks=4, weights="tied"),
    Case(schedule="ZBVZeroBubble", num_ranks=4),
    Case(schedule="DualPipeV", num_ranks=4, weights="tied"),
    UNEVEN[0],
    UNEVEN[3],
)
HALF = (Case(schedule="ZBVZeroBubble", num_ranks=2, weights="tied", dtype=torch.bfloat16),)
FROM_CSV = (Case(schedule="ZBVZeroBubble", num_ranks=2, weights="tied", is_csv=True),)
PLANTED = (
    Case(schedule="1F1B", num_ranks=2, weights="tied", plant="scale_grads"),
    Case(schedule="1F1B", num_ranks=2, plant="mean_per_microbatch"),
    Case(schedule="1F1B", num_ranks=2, weights="tied", plant="tie_not_summed"),
    Case(schedule="1F1B", num_ranks=2, weights="tied", plant="tie_counted_twice"),
    Case(schedule="ZBVZeroBubble", num_ranks=2, weights="tied", plant="tie_stepped_twice"),
    # Of two sequences: behind one alone, stale values would only fill positions that nothing attends to.
    Case(schedule="1F1B", num_ranks=2, plant="stale_shapes", microbatch=2),
    Case(schedule="ZBVZeroBubble", num_ranks=2, plant="defer_pp_recv"),
    Case(schedule="InterleavedZeroBubble", num_ranks=2, plant="defer_pp_recv"),
    Case(schedule="GPipe", num_ranks=2, plant="losses_out_of_order"),
)
NORMAL = SPANNING + HALF + FROM_CSV + PLANTED
SLOW = tuple(case for case in MATRIX + UNEVEN if case not in SPANNING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicated:
    """Two pipelines of two ranks, each with half of the microbatches, under torch's wrapper for data parallelism."""

    schedule: ScheduleName

    @property
    def placement(self) -> Placement:
        return Case(schedule=self.schedule, num_ranks=2).placement


REPLICATED = (Replicated(schedule="1F1B"), Replicated(schedule="InterleavedZeroBubble"))
HALF_BATCH = replace(BATCH, global_batch=4)
