"""The common form of all spellings: a model's modules in the order they run, stages of them, and errors of a spec.

Modules are named in full, short or as torchtitan does; entries of lists may be ranges or have a wildcard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from manifests.brief import brief
from manifests.errors import LayoutError, UsageError
from manifests.placement import Placement, Style
from manifests.schedules import rules
from reshard.formatting import WIDTH, did_you_mean, in_one_line, shorten

MAX_STAGES = 4096

# Cost of each module by name, in any unit: parameters, bytes, FLOPs, seconds.
ModuleCosts = Mapping[str, float]

# torch's schedules, and the placement that each needs.
SCHEDULES: Mapping[str, Style] = {name: "v" if name in rules.V_SCHEDULES else "loop" for name in rules.SCHEDULES}


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLayout:
    """Every module on exactly one stage, in execution order; a stage may be empty.

    `spec` is the layout as given; `schedule` is a hint for the runner.
    """

    spec: str
    stages: tuple[tuple[str, ...], ...]
    placement: Placement
    schedule: str | None

    __repr__ = brief


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


_BASES = ("model.decoder.", "model.", "transformer.")  # prefixes that short names omit
# The names of the common Hugging Face decoder, for layouts read without a model.
EMBEDDING, LAYER, NORM, HEAD = "model.embed_tokens", "model.layers.", "model.norm", "lm_head"

_RANGE = re.compile(r"(.*\.)([0-9]{1,6})-([0-9]{1,6})")
# A module without weights, which NeMo AutoModel lists on every stage.
WEIGHTLESS = "rotary_emb"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Modules in execution order: inputs, decoder layers, MTP layers, outputs.

    Stages are contiguous runs of `modules`, so a layout is a tuple of bounds into it.
    """

    modules: tuple[str, ...]
    num_inputs: int  # Megatron's E: the embedding
    num_layers: int  # decoder layers, MTP not counted
    num_mtp: int  # multi-token prediction layers, numbered after the decoders

    @property
    def layers_stop(self) -> int:
        """The position after the last decoder or MTP layer."""
        return self.num_inputs + self.num_layers + self.num_mtp

    @property
    def mtp_start(self) -> int:
        return self.num_inputs + self.num_layers


def inventory_of_layers(num_layers: int, num_mtp: int = 0) -> Inventory:
    """Return the modules of a decoder with that many layers, by their Hugging Face names."""
    layers = tuple(f"{LAYER}{index}" for index in range(num_layers + num_mtp))
    return Inventory(modules=(EMBEDDING, *layers, NORM, HEAD), num_inputs=1, num_layers=num_layers, num_mtp=num_mtp)


def inventory_of_modules(modules: Sequence[str], num_layers: int) -> Inventory:
    """Sort a model's modules, in execution order, into inputs, layers and outputs.

    Names that end in a number are layers; those past `num_layers` are MTP layers.
    """
    numbered = [index for index, name in enumerate(modules) if name.rpartition(".")[2].isdecimal()]
    first = numbered[0] if numbered else 0
    if numbered != list(range(first, first + len(numbered))) or not 0 < num_layers <= len(numbered):
        raise ValueError(f"layers are not one run of at least {num_layers}: {modules}")
    return Inventory(
        modules=tuple(modules),
        num_inputs=first,
        num_layers=num_layers,
        num_mtp=len(numbered) - num_layers,
    )


def positions_by_name(inventory: Inventory) -> dict[str, int]:
    """Return the position of each module under all its names: Hugging Face's, full and short, and torchtitan's."""
    table = {name: position for position, name in enumerate(inventory.modules)}
    last = len(inventory.modules) - 1
    aliases = [(short_name(name), position) for name, position in table.items()]
    aliases += [("tok_embeddings", 0), ("output", last), ("lm_head", last)]
    aliases += [(f"mtp_layers.{index}", inventory.mtp_start + index) for index in range(inventory.num_mtp)]
    for alias, position in aliases:
        table.setdefault(alias, position)
    return table


def short_name(module: str) -> str:
    """Return a module's name without the base model's prefix: `layers.0` for `model.layers.0`, `h.0` for GPT-2's."""
    base = next((base for base in _BASES if module.startswith(base)), "")
    return module.removeprefix(base)


def compress_modules(modules: Iterable[str]) -> str:
    """Return a short list of modules: `model.embed_tokens, model.layers.0-7`."""
    return ", ".join(module_ranges(modules))


def modules_shown(modules: Sequence[str]) -> str:
    """Return a short list of modules, in the syntax of layout files: `embed_tokens, layers.0-7`."""
    return compress_modules(map(short_name, modules)) or "(empty)"


def module_ranges(modules: Iterable[str]) -> tuple[str, ...]:
    """Shorten runs of numbered names: `model.layers.0`, ..., `model.layers.7` to `model.layers.0-7`."""
    runs: list[tuple[str, int, int]] = []  # prefix or whole name, first and last number or -1
    for name in modules:
        numbered = re.fullmatch(r"(.*\.)(0|[1-9][0-9]{0,8})", name)
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


class NameProblem(ValueError):
    """A name that matches no module; `hint` is the nearest valid one."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint


class Names:
    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.positions = positions_by_name(inventory)

    def position_of(self, name: str) -> int:
        """Return the position of one module."""
        if name not in self.positions:
            raise self._unknown(name)
        return self.positions[name]

    def positions_of(self, entry: str) -> list[int]:
        """Return the positions of a name, a range (`layers.0-7`) or a wildcard (`layers.*`).

        Empty for a module without weights.
        """
        if entry in self.positions:
            return [self.positions[entry]]
        if entry.rpartition(".")[2] == WEIGHTLESS:
            return []
        if "*" in entry:
            return self._matching(entry)
        if match := _RANGE.fullmatch(entry):
            return self._between(entry, match[1], int(match[2]), int(match[3]))
        raise self._unknown(entry)

    def _matching(self, entry: str) -> list[int]:
        head, _, tail = entry.partition("*")
        if "*" in tail:
            raise NameProblem(f"expected one *, found {shorten(entry)!r}", "list several names instead")
        positions = {
            position
            for name, position in self.positions.items()
            if name.startswith(head) and name.endswith(tail) and len(name) >= len(entry) - 1
        }
        if not positions:
            raise NameProblem(f"{shorten(entry)!r} matches no module", self._all_names())
        return sorted(positions)

    def _between(self, entry: str, prefix: str, first: int, last: int) -> list[int]:
        if first > last:
            raise NameProblem(f"{shorten(entry)!r} ends before it starts", f"write {prefix}{last}-{first}")
        for number in (first, last):
            if f"{prefix}{number}" not in self.positions:
                raise self._unknown(f"{prefix}{number}")
        return [self.positions[f"{prefix}{number}"] for number in range(first, last + 1)]

    def _unknown(self, name: str) -> NameProblem:
        prefix, _, number = name.rpartition(".")
        if number.isdecimal() and f"{prefix}.0" in self.positions:
            hint = f"the last layer is {self.inventory.modules[self.inventory.layers_stop - 1]}"
        else:
            hint = did_you_mean(name, self.positions) or self._all_names()
        return NameProblem(f"{shorten(name)!r} is not a module of this model", hint)

    def _all_names(self) -> str:
        return f"the modules are {compress_modules(self.inventory.modules)}"
