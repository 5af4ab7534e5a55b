"""Balanced layouts: `balance:COST`."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace

from manifests.command.sizes import parse_size
from manifests.errors import LayoutError, Parameter
from manifests.placement import Placement
from reshard.formatting import did_you_mean, list_words, shorten
from reshard.layouts.degrees import DEGREES, Degrees, Options, Word, layout_of, read_words
from reshard.layouts.items import pin_windows
from reshard.layouts.model import Inventory, ModuleCosts, NameProblem, Names, Request, StageLayout, error_at
from reshard.layouts.solve import Problem, solve

logger = logging.getLogger(__name__)

COSTS = ("params", "bytes", "flops", "time", "memory")
KEYS = (*DEGREES, "pin", "limit")


def read_balance(request: Request) -> StageLayout:
    """Read `balance:COST,pp=N[,vpp=K][,style=v][,pin=MODULE@STAGE]...[,limit=BYTES][,schedule=NAME]`.

    `limit` is the memory limit of one rank, over all its stages (`80GB`, `75GiB`). The first module is on the first
    stage and the last module on the last (so tied ones share a rank in style v), unless pinned elsewhere. Norm and head
    are split only when that makes the slowest stage or rank cheaper.
    """
    words = read_words(request.spec)[1:]
    pins = [word for word in words if word.key == "pin"]
    options, degrees, placement = _read_options(request, words)
    costs, inventory = _costs(request), request.inventory
    pinned = [_pin(request, word, placement.num_stages) for word in pins]
    problem = Problem(
        costs=costs,
        placement=placement,
        pins=_with_ends(pinned, len(inventory.modules), placement.num_stages),
        together=_together(inventory),
    )
    limit = _limit(options)
    if limit is not None:
        problem = _within(limit, request, problem)
    split = solve(problem)
    if split is None:
        raise _no_split(request, problem, pins, limit or 0)
    if not split.proven:
        logger.warning("%s: the search hit its step limit; a better split may exist", shorten(request.spec))
    return layout_of(request, split.bounds, degrees)


def balances(spec: str, cost: str) -> bool:
    return re.match(rf"\s*balance\s*:\s*{cost}\b", spec) is not None


def unsolved(request: Request) -> StageLayout:
    """Return what `read_balance` will return, with all modules on the first stage."""
    _, degrees, placement = _read_options(request, read_words(request.spec)[1:])
    stages = (request.inventory.modules, *[()] * (placement.num_stages - 1))
    return StageLayout(spec=request.spec, stages=stages, placement=placement, schedule=degrees.schedule)


def _read_options(request: Request, words: tuple[Word, ...]) -> tuple[Options, Degrees, Placement]:
    options = Options(request, [word for word in words if word.key != "pin"], KEYS)
    degrees = Degrees.read(options)
    placement, num_modules = degrees.placement(request), len(request.inventory.modules)
    if placement.num_stages > num_modules:
        raise options.error(
            "pp",
            f"expected at most {num_modules} stages, one per module, found {placement.num_stages}",
            "lower pp or vpp",
            code="layout.too-many-stages",
        )
    return options, degrees, placement


def _costs(request: Request) -> tuple[float, ...]:
    method, _, name = request.spec.partition(",")[0].partition(":")
    if (name := name.strip()) not in COSTS:
        problem, hint = f"expected {list_words(COSTS)}, found {shorten(name)!r}", did_you_mean(name, COSTS)
        raise error_at(request.spec, len(method) + 1, problem, hint, code="layout.unknown-cost")
    return _cost_of_each(request, name, f"balance:{name}")


def _cost_of_each(request: Request, name: str, option: str) -> tuple[float, ...]:
    """Return the cost of every module, from what the caller passed."""
    costs: ModuleCosts | None = (request.costs or {}).get(name)
    if costs is None:
        hint = (
            f"pass {Parameter('measured')} with the times that runner measure has written"
            if name == "time"
            else "pass a model: reshard plan SOURCE --layout " + shorten(request.spec)
        )
        raise LayoutError(
            "layout",
            f"{option} needs the {name} of every module, found none",
            hint,
            code="layout.missing-costs",
        )
    for module in request.inventory.modules:
        cost = costs.get(module)
        if cost is None or not math.isfinite(cost) or cost < 0:
            problem = f"expected a number, 0 or more, found {'nothing' if cost is None else cost}"
            raise LayoutError(f"{name} of {module}", problem, code="layout.bad-cost")
    return tuple(costs[module] for module in request.inventory.modules)


def _limit(options: Options) -> int | None:
    text = options.text("limit")
    if text is None:
        return None
    limit = parse_size(text)
    if limit is None:
        raise options.error(
            "limit",
            f"limit must be a size with a unit, found {shorten(text)!r}",
            "write for example 80GiB (80GB means the same)",
            code="layout.bad-option",
        )
    return limit


def _within(limit: int, request: Request, problem: Problem) -> Problem:
    """Add a memory limit per rank, in bytes, to a problem."""
    memory, schedule = _cost_of_each(request, "memory", "limit"), request.in_flight
    if schedule is None:
        return replace(problem, memory=memory, memory_limit=limit)
    activations = tuple(schedule.activations[module] for module in request.inventory.modules)
    most = max(schedule.microbatches)
    return replace(
        problem,
        memory=tuple(fixed - most * more for fixed, more in zip(memory, activations, strict=True)),
        activations=activations,
        in_flight=schedule.microbatches,
        memory_limit=max(0, limit - schedule.reserved),
    )


def _pin(request: Request, word: Word, num_stages: int) -> tuple[int, int]:
    name, at, stage = word.value.rpartition("@")
    position = word.value_position
    if not at or not re.fullmatch(r"[0-9]{1,9}", stage):
        raise error_at(
            request.spec,
            position,
            "expected pin=MODULE@STAGE",
            "write for example pin=lm_head@3",
            code="layout.bad-pin",
        )
    try:
        item = Names(request.inventory).position_of(name)
    except NameProblem as problem:
        raise error_at(request.spec, position, str(problem), problem.hint, code="layout.unknown-module") from problem
    if int(stage) >= num_stages:
        outside = f"expected a stage from 0 to {num_stages - 1}, found {int(stage)}"
        raise error_at(request.spec, position + len(name) + 1, outside, code="layout.bad-pin")
    return item, int(stage)


def _with_ends(pins: list[tuple[int, int]], num_items: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Pin the first module to the first stage and the last to the last, unless a pin conflicts with that."""
    for item, stage in ((0, 0), (num_items - 1, num_stages - 1)):
        if pin_windows(num_items, num_stages, [*pins, (item, stage)]):
            pins = [*pins, (item, stage)]
    return tuple(pins)


def _together(inventory: Inventory) -> frozenset[int]:
    """Return the bounds inside Megatron's E and L."""
    return frozenset((*range(1, inventory.num_inputs), *range(inventory.layers_stop + 1, len(inventory.modules))))


def _no_split(request: Request, problem: Problem, pins: list[Word], limit: int) -> LayoutError:
    modules, placement = request.inventory.modules, problem.placement
    for index, word in enumerate(pins):
        if not pin_windows(len(modules), placement.num_stages, problem.pins[: index + 1]):
            conflict, hint = "pin conflicts with the ones before it", "stages follow the order in which the modules run"
            return error_at(request.spec, word.position, conflict, hint, code="layout.conflicting-pins")
    free = problem.memory_limit or 0
    memory = problem.memory
    if problem.in_flight:  # no stage has less
        fewest = min(problem.in_flight)
        memory = tuple(fixed + fewest * more for fixed, more in zip(memory, problem.activations, strict=True))
    largest = max(range(len(modules)), key=lambda item: memory[item])
    hint = "raise the limit, or use more ranks"
    if memory[largest] > free:
        reason = f"{modules[largest]} alone needs {memory[largest]:,.0f}"
    elif sum(memory) > free * placement.num_ranks:
        reason = f"the model needs {sum(memory):,.0f} over {placement.num_ranks} ranks"
    else:
        reason = "found no contiguous split that fits"
    wires = f", {limit - free:,} of them for buffers and temporary memory" if free < limit else ""
    return LayoutError(
        "layout", f"limit is {limit:,} bytes per rank{wires}; {reason}", hint, code="layout.memory-limit"
    )
