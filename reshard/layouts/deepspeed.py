"""DeepSpeed's `PipelineModule(partition_method=...)`.

The items are modules: embedding, decoder layers, norm, head.
Source: microsoft/DeepSpeed edaa7221, `runtime/pipe/module.py` `_partition_layers`, `runtime/utils.py`
`partition_uniform` and `partition_balanced`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from itertools import accumulate

from reshard.formatting import list_words
from reshard.layouts.degrees import DEGREES, Degrees, Options, layout_of, read_words
from reshard.layouts.errors import error_at
from reshard.layouts.inventory import class_names
from reshard.layouts.model import Request, StageLayout

MOST_REGEX = 200  # characters


def uniform_bounds(num_items: int, num_stages: int) -> tuple[int, ...]:
    """Return the bounds of `uniform`: equal counts, the remainder on the earliest stages."""
    base, extra = divmod(num_items, num_stages)
    return tuple(accumulate((base + (stage < extra) for stage in range(num_stages)), initial=0))


def balanced_bounds(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the bounds of DeepSpeed's `parameters` and `type:`, which minimize max - min.

    For each prefix and number of stages its recurrence keeps only the split with the least difference (the
    last one, of equals), so it misses even its own optimum. Layouts of these names are solved by
    `reshard.layouts.solve`; this is for comparison, and for printing a layout as DeepSpeed would make it.
    """
    num_items = len(weights)
    if num_items <= num_stages:
        return uniform_bounds(num_items, num_stages)
    sums = list(accumulate(weights, initial=0))
    # By number of items, for the stages so far: most, least, start of the last stage.
    best: list[tuple[float, float, int] | None] = [(0, float("inf"), 0)] + [None] * num_items
    starts: list[list[int]] = []
    for stage in range(1, num_stages + 1):
        row: list[tuple[float, float, int] | None] = [None] * (num_items + 1)
        for stop in range(stage, num_items + 1):
            for start in range(stage - 1, stop):
                if (before := best[start]) is None:
                    continue
                most, least = max(before[0], sums[stop] - sums[start]), min(before[1], sums[stop] - sums[start])
                found = row[stop]
                if found is None or most - least <= found[0] - found[1]:
                    row[stop] = (most, least, start)
        best = row
        starts.append([found[2] if found else 0 for found in row])
    bounds = [num_items]
    for row_starts in reversed(starts):
        bounds.append(row_starts[bounds[-1]])
    return tuple(reversed(bounds))


def read_uniform(request: Request) -> StageLayout:
    """Read `uniform,pp=N[,vpp=K][,style=v][,schedule=NAME]`."""
    options = Options(request, read_words(request.spec)[1:], DEGREES)
    degrees = Degrees.read(options)
    placement = degrees.placement(request)
    return layout_of(request, uniform_bounds(len(request.inventory.modules), placement.num_stages), degrees)


def matching_weights(request: Request, pattern: str, position: int) -> dict[str, float]:
    """Weigh 1 each module whose class name matches, case ignored, and 0 the others.

    Raises:
        LayoutError: not a regular expression, or one that no class matches. Points at the character.
    """
    classes = class_names(request.inventory)
    known = list_words(dict.fromkeys(classes), "and")
    if not pattern or len(pattern) > MOST_REGEX:
        raise error_at(
            request.spec,
            position,
            f"expected a regular expression of at most {MOST_REGEX} characters",
            f"module classes are {known}",
            code="layout.bad-regex",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of expressions whose meaning may change
            matcher = re.compile(pattern, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:
        at = getattr(error, "pos", None) or 0
        raise error_at(
            request.spec, position + at, f"not a regular expression: {error}", code="layout.bad-regex"
        ) from error
    matched = {name: bool(matcher.search(name)) for name in set(classes)}
    if not any(matched.values()):
        raise error_at(
            request.spec, position, "matches no module class", f"module classes are {known}", code="layout.no-match"
        )
    return {module: float(matched[name]) for module, name in zip(request.inventory.modules, classes, strict=True)}
