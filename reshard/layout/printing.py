"""Prints a layout in the spelling of another program, or says why it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from manifests.errors import InputError, LayoutError
from reshard.layout.deepspeed import balanced_bounds, uniform_bounds
from reshard.layout.inventory import Inventory, class_names
from reshard.layout.megatron import write_letters
from reshard.layout.model import ModuleCosts, StageLayout, module_ranges
from reshard.layout.spelling import parse_layout

__all__ = ["SPELLINGS", "print_layout", "to_deepspeed", "to_megatron", "to_toml", "to_torchtitan"]

AllCosts = Mapping[str, ModuleCosts]


def to_megatron(layout: StageLayout, inventory: Inventory, costs: AllCosts | None = None) -> str:
    """Return Megatron's `--pipeline-model-parallel-layout` string.

    Raises:
        LayoutError: embedding, or norm and head, on two stages; MTP layers where Megatron has none; style v.
    """
    placement = layout.placement
    if any(placement.rank_of(stage) != stage % placement.num_ranks for stage in range(placement.num_stages)):
        raise LayoutError(
            "layout",
            "Megatron needs style loop, this layout has style v",
            "set style=loop",
            code="layout.inexpressible",
        )
    ends = list(accumulate((len(stage) for stage in layout.stages), initial=0))
    for name, start, stop in (("E", 0, inventory.num_inputs), ("L", inventory.layers_stop, len(inventory.modules))):
        split = [stage for stage, end in enumerate(ends[1:-1]) if start < end < stop]
        if split:
            first, last = inventory.modules[start], inventory.modules[stop - 1]
            raise LayoutError(
                "layout",
                f"Megatron's {name} is {first} to {last} on one stage, this layout splits them after stage {split[0]}",
                f"move {first} to stage {split[-1] + 1} (when balancing: pin={first}@{split[-1] + 1})",
                code="layout.inexpressible",
            )
    letters = (
        "E" + "." * (inventory.num_inputs - 1)
        + "t" * inventory.num_layers
        + "m" * inventory.num_mtp
        + "L" + "." * (inventory.num_outputs - 1)
    )  # fmt: skip
    stages = [letters[start:stop].replace(".", "") for start, stop in pairwise(ends)]
    _check_mtp(stages, placement.num_ranks)
    return write_letters(stages)


def to_torchtitan(layout: StageLayout, inventory: Inventory, costs: AllCosts | None = None) -> str:
    """Return torchtitan's `module_fqns_per_model_part` as JSON: a list of module names for each stage.

    It has no placement; in torchtitan the schedule decides that.

    Raises:
        LayoutError: a model with more modules than torchtitan's decoder has.
    """
    if inventory.num_inputs != 1 or inventory.num_outputs != 2:
        raise LayoutError(
            "layout",
            "torchtitan's decoder has one embedding, layers, one norm and one head, this model has others",
            code="layout.inexpressible",
        )
    names = ["tok_embeddings"]
    names += [f"layers.{index}" for index in range(inventory.num_layers)]
    names += [f"mtp_layers.{index}" for index in range(inventory.num_mtp)]
    names += ["norm", "lm_head"]
    theirs = dict(zip(inventory.modules, names, strict=True))
    return json.dumps([[theirs[module] for module in stage] for stage in layout.stages])


def to_toml(layout: StageLayout, inventory: Inventory | None = None, costs: AllCosts | None = None) -> str:
    """Return the TOML file of module lists, which can express every layout."""
    lines = [f"num_ranks = {layout.placement.num_ranks}", f'style = "{layout.placement.style}"']
    if layout.schedule:
        lines.append(f'schedule = "{layout.schedule}"')
    stages = [f"    {json.dumps(module_ranges(stage))}," for stage in layout.stages]
    return "\n".join([*lines, "stages = [", *stages, "]", ""])


def to_deepspeed(layout: StageLayout, inventory: Inventory, costs: AllCosts | None = None) -> str:
    """Return the DeepSpeed `partition_method` that makes this layout, here and in DeepSpeed.

    `parameters` is tried if `costs` has them.

    Raises:
        LayoutError: virtual stages, which DeepSpeed does not support; or no method that makes these cuts.
    """
    num_stages, num_ranks = layout.placement.num_stages, layout.placement.num_ranks
    if num_stages != num_ranks:
        raise LayoutError(
            "layout",
            f"DeepSpeed supports one stage per rank, this layout has {layout.placement.num_virtual}",
            code="layout.inexpressible",
        )
    bounds = tuple(accumulate((len(stage) for stage in layout.stages), initial=0))
    if bounds == uniform_bounds(len(inventory.modules), num_stages):
        return f"uniform,pp={num_stages}"
    for method, weights in _methods(inventory, costs):
        spec = f"{method},pp={num_stages}"
        if bounds == balanced_bounds(weights, num_stages) and _makes(spec, layout, inventory, costs):
            return spec
    tried = (
        "uniform, parameters and type:" if costs and "params" in costs else "uniform and type: (parameters are unknown)"
    )
    raise LayoutError(
        "layout",
        f"no partition_method of DeepSpeed makes these stages: tried {tried}",
        "DeepSpeed has no explicit lists; use toml, torchtitan or megatron",
        code="layout.inexpressible",
    )


SPELLINGS: Mapping[str, Callable[[StageLayout, Inventory, AllCosts | None], str]] = {
    "megatron": to_megatron,
    "torchtitan": to_torchtitan,
    "toml": to_toml,
    "deepspeed": to_deepspeed,
}


def print_layout(spelling: str, layout: StageLayout, inventory: Inventory, costs: AllCosts | None = None) -> str:
    """Return the layout in a spelling of `SPELLINGS`.

    Raises:
        LayoutError: the spelling cannot express it; the message says why.
    """
    return SPELLINGS[spelling](layout, inventory, costs)


def _check_mtp(stages: Sequence[str], num_ranks: int) -> None:
    mtp = [stage for stage, letters in enumerate(stages) if "m" in letters]
    if len(mtp) > 1:
        raise LayoutError(
            "layout", f"Megatron accepts MTP layers on one stage only, found them on {mtp}", code="layout.inexpressible"
        )
    if mtp and mtp[0] < len(stages) - num_ranks:
        raise LayoutError(
            "layout",
            f"Megatron accepts MTP layers only in the last virtual stage of a rank, found them on stage {mtp[0]} "
            f"of {len(stages)}",
            code="layout.inexpressible",
        )


def _methods(inventory: Inventory, costs: AllCosts | None) -> list[tuple[str, list[float]]]:
    methods = []
    if costs and "params" in costs:
        methods.append(("parameters", [costs["params"][module] for module in inventory.modules]))
    classes = class_names(inventory)
    layer = classes[inventory.num_inputs]
    methods.append((f"type:{layer}", [float(name == layer) for name in classes]))
    return methods


def _makes(spec: str, layout: StageLayout, inventory: Inventory, costs: AllCosts | None) -> bool:
    try:
        return parse_layout(spec, inventory, costs=costs).stages == layout.stages
    except InputError:
        return False
