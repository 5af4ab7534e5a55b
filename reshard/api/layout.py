"""layout: what a layout means, without a model."""

from __future__ import annotations

from collections.abc import Mapping

from manifests.errors import Parameter, check_count
from manifests.models.config import MAX_LAYERS
from reshard.estimate.costs import ModuleTime
from reshard.layouts.inventory import inventory_of_layers
from reshard.layouts.model import StageLayout
from reshard.packing.resolve import LayoutRequest, lay_out_layers


def layout(
    spec: str,
    *,
    layers: int,
    mtp: int = 0,
    pp: int | None = None,
    measured: Mapping[str, ModuleTime] | None = None,
) -> StageLayout:
    """Lay out the modules of a model of so many decoder layers, which a layout names, without the model.

    `spec` and `pp` are those of `plan`; `mtp` is the number of multi-token prediction layers,
    which follow the decoders. `measured` has the time of each module, for `balance:time`.

    Units: `measured` in seconds.
    Raises:
        LayoutError: the layout is invalid, or does not cover the modules.
        UsageError: arguments conflict.

    Example:
        >>> plan = reshard.layout("pp=2", layers=4)
        >>> plan.stages[1][-1], plan.placement.num_ranks
        ('lm_head', 2)
    """
    check_count(Parameter("layers"), layers, most=MAX_LAYERS)
    check_count(Parameter("mtp"), mtp, least=0, most=MAX_LAYERS)
    request = LayoutRequest(spec=spec, num_ranks=pp)
    return lay_out_layers(request, inventory_of_layers(layers, mtp), measured)
