"""The common form of all spellings: stages of module names, in order, and their placement; and errors of a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from manifests.errors import LayoutError, UsageError
from manifests.placement import Placement, Style
from reshard.formatting import WIDTH, in_one_line
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
    costs: Mapping[str, ModuleCosts] | None = None
    in_flight: InFlight | None = None


def cut_modules(modules: Sequence[str], bounds: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return the stages between bounds: stage s is `modules[bounds[s]:bounds[s + 1]]`."""
    return tuple(tuple(modules[start:stop]) for start, stop in pairwise(bounds))


class SpecError(LayoutError):
    """An invalid layout on the command line, hence exit code 2; one in a file is bad input (3)."""

    exit_code = UsageError.exit_code


def error_at(spec: str, position: int, problem: str, hint: str = "", *, code: str) -> LayoutError:
    """Return an error that shows the spec with a caret under `position`."""
    start = max(0, min(position - WIDTH // 2, len(spec) - WIDTH))
    head, tail = "…" if start else "", "…" if len(spec) > start + WIDTH else ""
    shown = head + in_one_line(spec[start : start + WIDTH]) + tail
    shown = f"{problem}\n  {shown}\n  {' ' * (len(head) + position - start)}^"
    return SpecError("layout", shown, hint, code=code)
