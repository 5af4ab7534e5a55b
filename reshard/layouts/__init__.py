"""Layouts: which stage has which modules. Reads every spelling into one form, balances, and prints."""

from __future__ import annotations

from collections.abc import Mapping

from manifests.models import ModelShape
from reshard.layouts.inventory import inventory_of_modules
from reshard.layouts.model import ModuleCosts, StageLayout
from reshard.layouts.spelling import parse_layout

__all__ = ["StageLayout", "layout_for", "parse_layout"]


def layout_for(
    shape: ModelShape,
    spec: str,
    *,
    num_ranks: int | None = None,
    costs: Mapping[str, ModuleCosts] | None = None,
) -> StageLayout:
    """Read a layout of a known model; see `parse_layout`."""
    inventory = inventory_of_modules(shape.modules, shape.num_layers)
    return parse_layout(spec, inventory, num_ranks=num_ranks, costs=costs)
