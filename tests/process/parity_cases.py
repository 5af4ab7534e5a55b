"""What the parity ranks run, and the options that the references repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from manifests.placement import Placement
from runner.recipe import BatchOptions, OptimOptions, ScheduleName

STEPS = 5
SEQ_LEN = 32
BATCH = BatchOptions(global_batch=8, microbatch=1, seq_len=SEQ_LEN)
# The first norms are above 1: every step is clipped.
OPTIM = OptimOptions(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_norm=0.5)

Weights = Literal["untied", "tied"]
Plant = Literal["scale_grads", "tie_not_summed", "tie_counted_twice"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training run. `stages` is a number of even stages, or each stage's share of modules."""

    schedule: ScheduleName
    num_ranks: int
    num_virtual: int
    weights: Weights
    shares: tuple[int, ...] = ()  # modules on each stage; none means as even as possible
    dtype: torch.dtype = torch.float32
    plant: Plant | None = None  # a known mistake

    @property
    def name(self) -> str:
        parts = [self.schedule, f"pp{self.num_ranks}", f"vpp{self.num_virtual}", self.weights]
        parts += ["-".join(map(str, self.shares))] if self.shares else []
        parts += ["bf16"] if self.dtype == torch.bfloat16 else []
        return "_".join([*parts, self.plant] if self.plant else parts)

    @property
    def placement(self) -> Placement:
        return Placement(num_stages=self.num_ranks * self.num_virtual, num_ranks=self.num_ranks)


def cut(modules: tuple[str, ...], shares: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    ends = [sum(shares[: stage + 1]) for stage in range(len(shares))]
    return tuple(modules[end - share : end] for end, share in zip(ends, shares, strict=True))


_VIRTUAL: Mapping[ScheduleName, int] = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}
_WEIGHTS: tuple[Weights, ...] = get_args(Weights)
_PLANTS: tuple[Plant, ...] = get_args(Plant)


def _matrix() -> tuple[Case, ...]:
    return tuple(
        Case(schedule=schedule, num_ranks=ranks, num_virtual=virtual, weights=weights)
        for ranks in (1, 2, 4)
        for schedule, virtual in _VIRTUAL.items()
        for weights in _WEIGHTS
    )


MATRIX = _matrix()
# 11 modules: embedding, 8 layers, norm, head.
UNEVEN = (
    Case(schedule="1F1B", num_ranks=4, num_virtual=1, weights="tied", shares=(5, 0, 5, 1)),
    Case(schedule="GPipe", num_ranks=4, num_virtual=1, weights="tied", shares=(1, 10, 0, 0)),
    Case(schedule="1F1B", num_ranks=4, num_virtual=1, weights="untied", shares=(0, 0, 6, 5)),
    Case(
        schedule="Interleaved1F1B",
        num_ranks=2,
        num_virtual=3,
        weights="tied",
        shares=(1, 0, 4, 3, 2, 1),
    ),
)
PLANTED = tuple(Case(schedule="1F1B", num_ranks=2, num_virtual=1, weights="tied", plant=plant) for plant in _PLANTS)
HALF = (Case(schedule="Interleaved1F1B", num_ranks=2, num_virtual=2, weights="tied", dtype=torch.bfloat16),)
CASES = MATRIX + UNEVEN + HALF + PLANTED
