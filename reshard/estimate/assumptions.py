"""What is assumed about a training run, where neither the model nor the layout says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manifests.errors import UsageError
from manifests.placement import Placement
from manifests.schedules import default_schedule
from reshard.estimate.costs import ModuleTime
from reshard.layout.model import StageLayout

if TYPE_CHECKING:
    from manifests.memory import Recompute

__all__ = ["MOST_PASSES", "Assumptions", "check_assumptions", "num_passes"]

_MICROBATCHES_PER_RANK = 4  # the default, which every schedule supports
MOST_PASSES = 1 << 19  # forward and backward, of the longest step to simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """What to assume about a training run; None: the layout's value, or a default that supports its stages."""

    schedule: str | None = None
    num_microbatches: int | None = None
    microbatch: int = 1  # sequences
    seq_len: int = 4096  # tokens
    policy: str = "fp32"  # or "bf16" or "mixed": see `--dtype-policy`
    replicate: int = 1  # data-parallel replicas, as `--dp-replicate`
    shard: int = 1  # data-parallel shards, as `--dp-shard`
    tensor: int = 1  # tensor-parallel degree, as `--tp`
    recompute: Recompute = "none"  # activation checkpointing, as `--ac`
    loss_chunk: int | None = None  # tokens, as `--loss-chunk`
    memory_limit: int | None = None  # bytes per rank
    measured: Mapping[str, ModuleTime] | None = None

    @property
    def num_per_stage(self) -> int:
        """The number of ranks that share each stage."""
        return self.replicate * self.shard * self.tensor

    def schedule_for(self, layout: StageLayout) -> str:
        """Return the name of the schedule to assume for a layout."""
        return self.schedule or layout.schedule or default_schedule(layout.placement)

    def microbatches_for(self, placement: Placement) -> int:
        """Return the number of microbatches per step to assume."""
        return self.num_microbatches or _MICROBATCHES_PER_RANK * placement.num_ranks


def check_assumptions(assumed: Assumptions) -> None:
    """Refuse assumptions that conflict, before a source is opened.

    Raises:
        UsageError: a tensor-parallel degree and chunks of the loss.
    """
    if assumed.tensor > 1 and assumed.loss_chunk is not None:
        raise UsageError(
            "--loss-chunk",
            "conflicts with --tp: a tensor-parallel LM head computes the logits of all tokens at once",
            "remove --loss-chunk",
            code="options.tp-loss-chunk",
        )


def num_passes(placement: Placement, num_microbatches: int) -> int:
    """Count the forward and backward passes of a step, over microbatches and stages."""
    return 2 * placement.num_stages * num_microbatches
