"""Which pipeline rank runs which stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from manifests.errors import LayoutError

Style = Literal["loop", "v"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Assignment of stages to pipeline ranks, the same number to each.

    `loop` assigns round-robin: stage s runs on rank s % P. `v` assigns two stages to each rank: s and S - 1 - s.

    Raises:
        LayoutError: no stages or ranks, or a number of stages that the ranks cannot share equally.
    """

    num_stages: int
    num_ranks: int
    style: Style = "loop"

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.num_ranks < 1:
            raise LayoutError(
                "layout",
                f"expected at least 1 stage and 1 rank, found {self.num_stages} and {self.num_ranks}",
                code="layout.no-stages",
            )
        if self.num_stages % self.num_ranks:
            problem = f"expected a multiple of {self.num_ranks} stages (ranks), found {self.num_stages}"
            raise LayoutError("layout", problem, code="layout.indivisible-stages")
        if self.style == "v" and self.num_virtual != 2:
            raise LayoutError(
                "layout",
                f"style v requires exactly 2 stages per rank, found {self.num_virtual}",
                f"use {2 * self.num_ranks} stages, or style loop",
                code="layout.not-a-v",
            )

    @property
    def num_virtual(self) -> int:
        """Stages on each rank."""
        return self.num_stages // self.num_ranks

    def rank_of(self, stage: int) -> int:
        """Return the rank that a stage runs on."""
        if self.style == "v":
            return min(stage, self.num_stages - 1 - stage)
        return stage % self.num_ranks

    def virtual_of(self, stage: int) -> int:
        """Return a stage's place among the stages of its rank."""
        return stage // self.num_ranks

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in ascending order."""
        if self.style == "v":
            return rank, self.num_stages - 1 - rank
        return tuple(range(rank, self.num_stages, self.num_ranks))
