"""What the parity ranks run, and the options that the references repeat."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from manifests.placement import Placement
from manifests.schedules.actions import Table, actions_of
from manifests.schedules.rules import SCHEDULES, ScheduleName
from manifests.schedules.tables import schedule_table
from runner.config.schema import BatchOptions, OptimOptions
from runner.data.sequences import Batch
from tests.covering import covering
from tests.fast.manifests.models.built import DECODERS, TINY
from tests.fast.runner.tiny import padded_batch

STEPS = 3  # each shape of a batch, the first one again, and clipping behind them
EVALUATED = COMPARED = 2  # steps from the first on: one of each shape
SEQ_LEN = 32
BATCH = BatchOptions(global_batch=8, microbatch=1, seq_len=SEQ_LEN)
# Less than any first norm: gradients are clipped.
OPTIM = OptimOptions(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_norm=0.4)

Weights = Literal["untied", "tied"]
# The model of each family, from tests/data/configs: of its forms, the one that asks for most.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in (*TINY, *DECODERS)},
    "tiny-falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "tiny-mistral": {"sliding_window": 16},
    "tiny-mixtral": {"sliding_window": 16},
    "tiny-opt": {"word_embed_proj_dim": 16},  # two tensors cross between stages
    "tiny-phi": {"qk_layernorm": True},
    "tiny-qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "tiny-qwen3": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
}
LLAMA = "llama"  # a larger one besides, with something for each of eight stages to do
FAMILIES = (LLAMA, *CHANGES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training run. `shares` are each stage's number of modules; none means as even as possible."""

    schedule: ScheduleName
    num_ranks: int
    family: str = LLAMA
    weights: Weights = "untied"
    num_virtual: int = 0  # 0: as few as the schedule takes
    shares: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    is_through_host: bool = False  # another way to exchange tensors
    is_csv: bool = False  # the schedule, read from a file
    steps: int = STEPS

    @property
    def vocab_size(self) -> int:
        return 320 if self.family == LLAMA else 96

    @property
    def name(self) -> str:
        parts = [self.family, self.schedule, f"pp{self.num_ranks}", f"vpp{self.placement.num_virtual}", self.weights]
        parts += ["-".join(map(str, self.shares))] if self.shares else []
        parts += ["bf16"] if self.dtype == torch.bfloat16 else []
        parts += ["csv"] if self.is_csv else []
        parts += ["through_host"] if self.is_through_host else []
        return "_".join(parts)

    @property
    def placement(self) -> Placement:
        is_v = self.schedule in ("ZBVZeroBubble", "DualPipeV")
        per_rank = self.num_virtual or (1 if self.schedule in ("GPipe", "1F1B") else 2)
        return Placement(num_stages=self.num_ranks * per_rank, num_ranks=self.num_ranks, style="v" if is_v else "loop")

    @property
    def table(self) -> Table:
        """What the ranks compute. A file's interleaved one is one that no name stands for: groups are Megatron's."""
        is_grouped = self.is_csv and self.schedule == "Interleaved1F1B"
        group = 2 * self.num_ranks if is_grouped else None
        return schedule_table(self.schedule, self.placement, BATCH.num_microbatches, microbatch_group=group)

    @property
    def order(self) -> tuple[int, ...]:
        """The order in which each stage adds the gradients of its microbatches."""
        if self.num_ranks == 1:
            return tuple(range(BATCH.num_microbatches))
        actions = (action for step in self.table.ranks[0] for action in actions_of(step))
        return tuple(action.microbatch for action in actions if action.stage == 0 and action.kind in "BW")


def cut_of(step: int) -> BatchOptions:
    """Give the shape of a step's batch: every third is shorter."""
    return replace(BATCH, seq_len=20) if step % 3 == 1 else BATCH


def batch_of(step: int, vocab_size: int) -> Batch:
    cut = cut_of(step)
    return padded_batch(step, size=cut.global_batch, seq_len=cut.seq_len, vocab_size=vocab_size)


def folder_of(models: Path, family: str, weights: Weights) -> Path:
    return models / family / weights


def cut_modules(modules: tuple[str, ...], shares: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    ends = [sum(shares[: stage + 1]) for stage in range(len(shares))]
    return tuple(modules[end - share : end] for end, share in zip(ends, shares, strict=True))


_WEIGHTS: tuple[Weights, ...] = get_args(Weights)
_CSV = Case(schedule="Interleaved1F1B", num_ranks=2, is_csv=True)


def _every_schedule(family: str, weights: Weights, num_ranks: int) -> tuple[Case, ...]:
    """Give each schedule by its name, and one from a file; alone, a rank knows them by its number of stages."""
    names = SCHEDULES if num_ranks > 1 or family == LLAMA else ("GPipe", "Interleaved1F1B")
    named = (Case(schedule=name, num_ranks=num_ranks, family=family, weights=weights) for name in names)
    from_csv = replace(_CSV, num_ranks=num_ranks, family=family, weights=weights)
    return (*named, from_csv) if num_ranks > 1 else tuple(named)


MATRIX = tuple(
    case
    for family in FAMILIES
    for num_ranks in (1, 2, 4)
    for weights in _WEIGHTS
    for case in _every_schedule(family, weights, num_ranks)
)


def _columns(case: Case) -> tuple[Hashable, ...]:
    """Make triples of a number of ranks, a tie and a schedule or family: ties are placed by all three."""
    return case.family, (case.num_ranks, case.weights), (case.schedule, case.is_csv)


# 11 modules: embedding, 8 layers, norm, head.
UNEVEN = (
    Case(schedule="1F1B", num_ranks=4, weights="tied", shares=(5, 0, 5, 1)),
    Case(schedule="GPipe", num_ranks=4, weights="tied", shares=(1, 10, 0, 0)),
    Case(schedule="1F1B", num_ranks=4, shares=(0, 0, 6, 5)),
    Case(schedule="Interleaved1F1B", num_ranks=2, num_virtual=3, weights="tied", shares=(1, 0, 4, 3, 2, 1)),
    Case(schedule="InterleavedZeroBubble", num_ranks=3, weights="tied"),
    Case(schedule="DualPipeV", num_ranks=3, weights="tied"),
)
# Each schedule, and each placement tied and untied; the slow cases have the other pairs. One takes more steps.
SPANNING = (
    Case(schedule="GPipe", num_ranks=1, weights="tied"),
    Case(schedule="ZBVZeroBubble", num_ranks=1),
    Case(schedule="GPipe", num_ranks=2),
    Case(schedule="1F1B", num_ranks=2, weights="tied", steps=10),
    Case(schedule="Interleaved1F1B", num_ranks=2, weights="tied"),
    Case(schedule="LoopedBFS", num_ranks=2, weights="tied"),
    Case(schedule="ZBVZeroBubble", num_ranks=2, weights="tied"),
    Case(schedule="1F1B", num_ranks=4),
    Case(schedule="InterleavedZeroBubble", num_ranks=4, weights="tied"),
    Case(schedule="DualPipeV", num_ranks=4, weights="tied"),
    UNEVEN[0],
    UNEVEN[3],
)
HALF = (Case(schedule="ZBVZeroBubble", num_ranks=2, weights="tied", dtype=torch.bfloat16),)
THROUGH_HOST = (Case(schedule="ZBVZeroBubble", num_ranks=2, weights="tied", is_through_host=True),)
FROM_CSV = (Case(schedule="ZBVZeroBubble", num_ranks=2, weights="tied", is_csv=True), _CSV)
NORMAL = SPANNING + HALF + THROUGH_HOST + FROM_CSV
SLOW = (
    *covering(MATRIX, _columns, SPANNING[:-2] + FROM_CSV),
    *(case for case in UNEVEN if case not in SPANNING),
)
