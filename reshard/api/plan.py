"""plan: what a layout does to a model, before a byte moves."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from reshard.estimate.training_estimate import Assumptions
from reshard.operations.resolve import LayoutRequest, PlanResult, plan_source

__all__ = ["plan"]


def plan(
    source: str | Path,
    layout: str | None = None,
    *,
    pp: int | None = None,
    drop: Collection[str] = (),
    assumed: Assumptions | None = None,
) -> PlanResult:
    """Plan the stages of a model and estimate a training step on them, from headers alone.

    `source` is a Hugging Face folder, a manifest, `org/name@revision` on the hub, an object-store URL, or a
    config.json alone. `layout` is a spelling that `--layout` takes (`pp=4`, a Megatron string, a file); a manifest
    keeps its own without one. `pp` is the number of pipeline ranks, for a spelling that does not say. `drop` names
    tensors to leave behind.

    Units: sizes in bytes, FLOPs per token; times in seconds if `assumed.measured` has them, otherwise in FLOPs.
    Raises:
        InputError: `source` or `layout` is wrong or cannot be read.
        UsageError: arguments that do not go together; `options.missing-layout` where a layout is needed.

    Example:
        >>> planned = reshard.plan("model", "pp=2", assumed=reshard.Assumptions(seq_len=128))
        >>> [stage.modules[0] for stage in planned.stages]
        ['model.embed_tokens', 'model.layers.2']
        >>> planned.forecast.schedule
        '1F1B'
    """
    asked = LayoutRequest(spec=layout, num_ranks=pp)
    return plan_source(str(source), asked, assumed or Assumptions(), drop)
