"""The common form of all spellings: stages of module names, in order, and their placement on ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from manifests.placement import Placement, Style
from reshard.layouts.inventory import Inventory

MAX_STAGES = 4096

# Cost of each module by name, in any unit: parameters, bytes, FLOPs, seconds.
ModuleCosts = Mapping[str, float]

# torch's schedules, and the placement that each needs.
SCHEDULES: Mapping[str, Style] = {
    "GPipe": "loop",
    "1F1B": "loop",
    "Interleaved1F1B": "loop",
    "LoopedBFS": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}
SINGLE_STAGE_SCHEDULES = ("GPipe", "1F1B")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLayout:
    """Every module on exactly one stage, in execution order; a stage may be empty.

    `spec` is the layout as given; `schedule` is a hint for the runner.
    """

    spec: str
    stages: tuple[tuple[str, ...], ...]
    placement: Placement
    schedule: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """What a memory limit needs to know about the schedule.

    `costs["memory"]` of a module includes activations of as many microbatches as the stage with the most has in flight.
    """

    microbatches: tuple[int, ...]  # most in flight, by stage
    activations: ModuleCosts  # bytes per module and microbatch
    reserved: int  # bytes per rank that belong to no module


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a reader gets: the spec, the model's modules, and the caller's options."""

    spec: str
    inventory: Inventory
    num_ranks: int | None = None
    strict_megatron: bool = False
    costs: Mapping[str, ModuleCosts] | None = None
    in_flight: InFlight | None = None


def cut_modules(modules: Sequence[str], bounds: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the stages between bounds: stage s is `modules[bounds[s]:bounds[s + 1]]`."""
    return tuple(tuple(modules[start:stop]) for start, stop in pairwise(bounds))


def compress_modules(modules: Iterable[str]) -> str:
    """Return a short list of modules: `model.embed_tokens, model.layers.0-7`."""
    return ", ".join(module_ranges(modules))


def module_ranges(modules: Iterable[str]) -> tuple[str, ...]:
    """Shorten runs of numbered names: `model.layers.0`, ..., `model.layers.7` to `model.layers.0-7`."""
    runs: list[tuple[str, int, int]] = []  # prefix or whole name, first and last number or -1
    for name in modules:
        numbered = re.fullmatch(r"(.*\.)(0|[1-9][0-9]*)", name)
        prefix, number = (numbered[1], int(numbered[2])) if numbered else (name, -1)
        if runs and numbered and runs[-1][0] == prefix and runs[-1][2] + 1 == number:
            runs[-1] = (prefix, runs[-1][1], number)
        else:
            runs.append((prefix, number, number))
    return tuple(_shown(*run) for run in runs)


def _shown(prefix: str, first: int, last: int) -> str:
    if first < 0:
        return prefix
    return f"{prefix}{first}" if first == last else f"{prefix}{first}-{last}"
