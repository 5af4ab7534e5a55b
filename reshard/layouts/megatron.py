"""Megatron-Core's `--pipeline-model-parallel-layout`: one letter per layer, `|` between stages.

Source: NVIDIA/Megatron-LM d98e8a64, `megatron/core/transformer/pipeline_parallel_layer_layout.py`.
"""

from __future__ import annotations

import re
from itertools import accumulate, groupby

from manifests.errors import LayoutError
from reshard.formatting import counted
from reshard.layouts.degrees import Degrees, layout_of, nearest_divisors
from reshard.layouts.errors import error_at, shorten
from reshard.layouts.expansion import Expansion, expand
from reshard.layouts.inventory import Inventory
from reshard.layouts.model import MAX_STAGES, Request, StageLayout

LAYERS = {"t": "decoder layer", "m": "MTP layer"}
HINT = "E (embedding) comes first, L (norm and head) last, each once"


def read_megatron(request: Request) -> StageLayout:
    """Read a layout string. Stage i is on rank i % PP; without a number of ranks, every stage has its own.

    Raises:
        LayoutError: what Megatron refuses, except white space, nested groups, and MTP layers on several or
            early stages; with `strict_megatron` those too. Points at the character.
    """
    expansion = expand(request.spec, request.strict_megatron)
    stages = expansion.text.split("|")
    places = [at for at, letter in enumerate(expansion.text) if letter != "|"]
    if not places:
        raise error_at(request.spec, 0, "expected layers, found none", HINT, code="layout.empty")
    _check_stages(request, stages)
    _check_ends(request, expansion, places)
    _check_layers(request, expansion, len(stages))
    if request.strict_megatron:
        _check_mtp_as_megatron(request, expansion, stages)
    inventory = request.inventory
    widths = {"E": inventory.num_inputs, "t": 1, "m": 1, "L": inventory.num_outputs}
    sizes = [sum(widths[letter] for letter in stage) for stage in stages]
    return layout_of(request, tuple(accumulate(sizes, initial=0)), Degrees(num_ranks=request.num_ranks))


def write_letters(stages: list[str]) -> str:
    """Write stages of letters as briefly as Megatron reads them: `Et*3|(tt|)*29,m|L`."""
    pieces = []
    for stage, run in groupby(stages[:-1]):
        times, once = len(list(run)), f"{_write_stage(stage)}|"
        repeated = f"({once})*{times}" if stage else f"|*{times}"
        pieces.append(min(once * times, repeated, key=len))
    text = "".join(pieces) + _write_stage(stages[-1])
    return re.sub(r"(\*\d+)(?=[EtmL])", r"\1,", text)


def _write_stage(stage: str) -> str:
    runs = ((letter, len(list(run))) for letter, run in groupby(stage))
    return "".join(min(f"{letter}*{times}", letter * times, key=len) for letter, times in runs)


def _check_stages(request: Request, stages: list[str]) -> None:
    num_stages, num_ranks = len(stages), request.num_ranks
    spec = shorten(request.spec)
    if num_stages > MAX_STAGES:
        raise LayoutError(
            "layout", f"expected at most {MAX_STAGES} stages, {spec} has {num_stages}", code="layout.too-many-stages"
        )
    if num_ranks and num_stages % num_ranks:
        raise LayoutError(
            "layout",
            f"{counted(request.inventory.num_layers, 'layer')} on {counted(num_ranks, 'rank')}: {spec} has "
            f"{counted(num_stages, 'stage')}, not a multiple of {num_ranks}",
            f"use PP {nearest_divisors(num_stages, num_ranks)}",
            code="layout.indivisible-stages",
        )


def _check_ends(request: Request, expansion: Expansion, places: list[int]) -> None:
    """Check that E is first and L last, each once; `places` are the positions of layers."""
    spec, text = request.spec, expansion.text
    for letter, place, where in (("E", places[0], "start"), ("L", places[-1], "end")):
        if text[place] != letter:
            found = f"expected {letter} at the {where}, found {text[place]!r}"
            raise error_at(spec, expansion.origins[place], found, HINT, code="layout.misplaced-end")
    for letter, second in (("E", text.find("E", places[0] + 1)), ("L", text.find("L", 0, places[-1]))):
        if second >= 0:
            raise error_at(
                spec, expansion.origins[second], f"{letter} must occur exactly once", HINT, code="layout.misplaced-end"
            )


def _check_layers(request: Request, expansion: Expansion, num_stages: int) -> None:
    """Check that there are as many t and m as the model has layers, and no t after an m."""
    spec, text, inventory = request.spec, expansion.text, request.inventory
    for letter, expected in (("t", inventory.num_layers), ("m", inventory.num_mtp)):
        found = text.count(letter)
        if found != expected:
            place = _place_of_count(text, letter, expected)
            num_filled = min(num_stages, max(inventory.num_layers, 1))  # none without a layer
            raise error_at(
                spec,
                expansion.origins[place],
                f"expected {expected} {letter} (the model's {LAYERS[letter]}s), found {found}",
                f"for {counted(num_filled, 'stage')} write {_even_layout(num_filled, inventory)}",
                code="layout.layer-count",
            )
    first_mtp = text.find("m")
    if first_mtp >= 0 and (late := text.find("t", first_mtp)) >= 0:
        raise error_at(
            spec,
            expansion.origins[late],
            "t after m: MTP layers (m) must come after all decoder layers",
            code="layout.wrong-order",
        )


def _place_of_count(text: str, letter: str, expected: int) -> int:
    """Return the position of the first surplus letter, or of the last one when there are too few."""
    places = [at for at, found in enumerate(text) if found == letter]
    if len(places) > expected:
        return places[expected]
    return places[-1] if places else len(text) - 1


def _check_mtp_as_megatron(request: Request, expansion: Expansion, stages: list[str]) -> None:
    mtp = [stage for stage, letters in enumerate(stages) if "m" in letters]
    num_ranks = request.num_ranks or len(stages)
    first = expansion.origins[expansion.text.find("m")] if mtp else 0
    if mtp and mtp[0] < len(stages) - num_ranks:
        raise error_at(
            request.spec,
            first,
            f"Megatron accepts m only in the last virtual stage of a rank, found it in stage {mtp[0]}",
            code="layout.not-megatron",
        )
    if len(mtp) > 1:
        raise error_at(
            request.spec,
            first,
            f"Megatron accepts m only in one stage, found it in stages {mtp}",
            code="layout.not-megatron",
        )


def _even_layout(num_stages: int, inventory: Inventory) -> str:
    """Return a layout of that many stages with the model's layers distributed evenly."""
    base, extra = divmod(inventory.num_layers, num_stages)
    stages = ["t" * (base + (stage < extra)) for stage in range(num_stages)]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * inventory.num_mtp + "L"
    return write_letters(stages)
