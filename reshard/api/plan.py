"""plan: the stages of a model, before a byte moves."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from reshard.estimate.assumptions import Assumptions
from reshard.packing.resolve import LayoutRequest, PlanResult, plan_source


def plan(
    source: str | Path,
    layout: str | None = None,
    *,
    pp: int | None = None,
    drop: Collection[str] = (),
    model: str | Path | None = None,
    assumed: Assumptions | None = None,
) -> PlanResult:
    """Plan the stages of a model and estimate a training step on them, from headers alone.

    `source` is a Hugging Face folder, a manifest, `org/name@revision` on the hub, an object-store URL, or a
    config.json alone. `layout` is a SPEC as in docs/layouts.md (`pp=4`, a Megatron string, a file); without one, a
    manifest keeps its own. `pp` is the number of pipeline ranks, if `layout` does not say it. `drop` lists tensors to
    leave out; `model` is a TOML file that describes a model of an unknown architecture (docs/own-models.md).

    Units: sizes in bytes, FLOPs per token; times in seconds if `assumed.measured` has them, otherwise in FLOPs.
    Raises:
        SourceError, ModelError, ShardError, ManifestError: the source is incomplete, damaged or unsupported.
        StoreError: the source does not exist, or cannot be reached.
        LayoutError: the layout is invalid, or does not cover the model.
        ScheduleError: the schedule does not support the layout.
        UsageError: arguments conflict, or a layout is required (`options.missing-layout`).

    Example:
        >>> planned = reshard.plan("model", "pp=2", assumed=reshard.Assumptions(seq_len=128))
        >>> [stage.modules[0] for stage in planned.stages]
        ['model.embed_tokens', 'model.layers.2']
        >>> planned.forecast.schedule
        '1F1B'
    """
    request = LayoutRequest(spec=layout, num_ranks=pp)
    return plan_source(str(source), request, assumed or Assumptions(), drop, None if model is None else Path(model))
