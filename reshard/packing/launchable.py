"""Whether `runner launch` accepts what was planned."""

from __future__ import annotations

from itertools import chain

from manifests.errors import UserError
from manifests.models import ConfigReader
from manifests.models.combinations import check_degrees
from manifests.models.config import CONFIG_NAME
from manifests.models.mtp import MtpLayers, count_layers
from manifests.models.trainable import (
    check_fields,
    check_modules,
    check_positions,
    check_trainable,
    find_family,
    generic_entry,
    hands_on_trees,
)
from reshard.estimate.training_estimate import Forecast, training_of
from reshard.formats.open import CONFIG_ONLY, config_of
from reshard.layouts.model import StageLayout
from reshard.tensors.checkpoint import Checkpoint


def check_launch(checkpoint: Checkpoint, layout: StageLayout, forecast: Forecast) -> None:
    """Refuse what `runner launch` refuses; a model that it does not train is planned on single ranks."""
    shape, assumed, config = checkpoint.shape, forecast.assumed, config_of(checkpoint)
    is_described = checkpoint.description is not None
    reader, entry = ConfigReader(config, CONFIG_NAME), None if is_described else generic_entry(shape.architecture)
    try:
        check_trainable(shape.architecture, is_described=is_described)
        if entry is not None:
            check_modules(entry, MtpLayers.trained_modules(entry, shape), layout.stages, CONFIG_NAME)
            check_fields(entry, reader)
    except UserError:
        if max(assumed.num_per_stage, assumed.expert) > 1:
            raise
        return
    check_positions(shape.architecture, reader, assumed.seq_len)
    hands_on = forecast.step is not None and hands_on_trees(shape.architecture)
    actions = chain.from_iterable(forecast.timeline.ranks) if hands_on else ()
    check_degrees(
        shape, config, training_of(assumed, shape), schedule=forecast.schedule,
        is_own=is_described or find_family(shape.architecture) is not None,
        splits_backward=any(timed.action.kind == "W" for timed in actions),
        # Of a config alone, MTP layers cannot be dropped before it is packed.
        num_mtp_layers=0 if checkpoint.source.kind == CONFIG_ONLY else count_layers(shape),
        has_loss_chunks=assumed.loss_chunk is not None,
    )  # fmt: skip
