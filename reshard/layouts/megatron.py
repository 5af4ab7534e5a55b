"""Megatron-Core's `--pipeline-model-parallel-layout`: one letter per layer, `|` between stages.

Source: NVIDIA/Megatron-LM d98e8a64, `megatron/core/transformer/pipeline_parallel_layer_layout.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate, groupby

from manifests.errors import LayoutError
from reshard.formatting import counted
from reshard.layouts.degrees import Degrees, layout_of
from reshard.layouts.inventory import Inventory
from reshard.layouts.model import Request, StageLayout, error_at

LETTERS = "EtmL"
MAX_LETTERS = 16384  # bars included; more stages and layers than any model has
LAYERS = {"t": "decoder layer", "m": "MTP layer"}
HINT = "E (embedding) comes first, L (norm and head) last, each once"

# Megatron's two passes, in order: (body)*n, then x*n.
_PASSES = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_CASES = {"e": "E", "T": "t", "M": "m", "l": "L"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """`text` has only layer letters and bars; `text[i]` is at `origins[i]` in the spec."""

    text: str
    origins: list[int]


def read_megatron(request: Request) -> StageLayout:
    """Read a layout string. Stage i is on rank i % PP; without a number of ranks, every stage has its own.

    Raises:
        LayoutError: what Megatron refuses, except white space, and MTP layers on several or early stages. Points at
            the character.
    """
    expansion = expand(request.spec)
    stages = expansion.text.split("|")
    places = [at for at, letter in enumerate(expansion.text) if letter != "|"]
    if not places:
        raise error_at(request.spec, 0, "expected layers, found none", HINT, code="layout.empty")
    degrees = Degrees(num_ranks=request.num_ranks)
    degrees.placement(request, len(stages))  # before anything is done per stage
    _check_ends(request, expansion, places)
    _check_layers(request, expansion, len(stages))
    inventory = request.inventory
    widths = {"E": inventory.num_inputs, "t": 1, "m": 1, "L": inventory.num_outputs}
    sizes = [sum(widths[letter] for letter in stage) for stage in stages]
    return layout_of(request, tuple(accumulate(sizes, initial=0)), degrees)


def expand(spec: str) -> Expansion:
    """Write out the repeats as Megatron does: drop commas, and white space, then one pass for groups, one for letters.

    Source: `parse_str_to_list`.
    Raises:
        LayoutError: an unknown letter, a group without a repeat or in another one, a bad or huge repeat.
    """
    if split := re.search(r"\d,*\s[\s,]*(?=\d)", spec):  # without the white space it would be another number
        problem, hint = "expected a letter, found a number", "write t*12, or t*1,t"
        raise error_at(spec, split.end(), problem, hint, code="layout.bad-repeat")
    origins = [at for at, letter in enumerate(spec) if letter != "," and not letter.isspace()]
    text = "".join(spec[at] for at in origins)
    for pattern in _PASSES if "*" in text else ():
        end, pieces, places = 0, [], []
        num_letters = len(text)
        for match in pattern.finditer(text):
            times = _times(match[2], spec, origins[match.start(2)])
            num_letters += len(match[1]) * times - len(match[0])
            if num_letters > MAX_LETTERS:
                raise _too_long(spec, origins[match.start(2)])
            pieces += [text[end : match.start()], match[1] * times]
            places += origins[end : match.start()]
            places += origins[match.start(1) : match.end(1)] * times
            end = match.end()
        text, origins = "".join(pieces) + text[end:], places + origins[end:]
    for letter, at in zip(text, origins, strict=True):
        if letter not in LETTERS + "|":
            raise _bad_letter(spec, letter, at)
    return Expansion(text=text, origins=origins)


def _bad_letter(spec: str, letter: str, at: int) -> LayoutError:
    if letter in "()":
        hint = "write (...)*n, with letters and bars alone inside"
        return error_at(spec, at, f"{letter} is not part of a repeated group", hint, code="layout.bad-group")
    if letter == "*":
        problem = "expected a letter or group before *, and a number after it"
        return error_at(spec, at, problem, "repeat a repeat as a group: (ttt)*3", code="layout.bad-repeat")
    if letter.isdecimal():
        count = spec.strip()
        hint = f"write pp={count} for {count} stages" if count.isdecimal() else "write t*3 for three layers"
        return error_at(spec, at, "expected a letter, found a number", hint, code="layout.bad-repeat")
    hint = "E embedding, t decoder layer, m MTP layer, L norm and head, | next stage"
    if letter in _CASES:
        hint = f"did you mean {_CASES[letter]}? {hint}"
    return error_at(spec, at, f"unknown layer letter {letter!r}", hint, code="layout.unknown-letter")


def _times(digits: str, spec: str, at: int) -> int:
    digits = digits.lstrip("0")
    if len(digits) > 9:
        raise _too_long(spec, at)
    return int(digits or "0")


def _too_long(spec: str, at: int) -> LayoutError:
    return error_at(spec, at, f"expected at most {MAX_LETTERS} letters after repeats", code="layout.too-long")


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


def _check_ends(request: Request, expansion: Expansion, places: list[int]) -> None:
    """Check that E is first and L last, each once; `places` are the positions of layers."""
    spec, text = request.spec, expansion.text
    for letter, place, where in (("E", places[0], "start"), ("L", places[-1], "end")):
        if text[place] != letter:
            problem = f"expected {letter} at the {where}, found {text[place]!r}"
            raise error_at(spec, expansion.origins[place], problem, HINT, code="layout.misplaced-end")
    for letter, second in (("E", text.find("E", places[0] + 1)), ("L", text.find("L", 0, places[-1]))):
        if second >= 0:
            raise error_at(
                spec, expansion.origins[second], f"{letter} must occur exactly once", HINT, code="layout.misplaced-end"
            )


def _check_layers(request: Request, expansion: Expansion, num_stages: int) -> None:
    """Check that there are as many t and m as the model has layers, and no t after an m."""
    spec, text, inventory = request.spec, expansion.text, request.inventory
    for letter, expected in (("t", inventory.num_layers), ("m", inventory.num_mtp)):
        count = text.count(letter)
        if count != expected:
            place = _place_of_count(text, letter, expected)
            num_filled = min(num_stages, max(inventory.num_layers, 1))  # none without a layer
            raise error_at(
                spec,
                expansion.origins[place],
                f"expected {expected} {letter} (the model's {LAYERS[letter]}s), found {count}",
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
    places = [at for at, other in enumerate(text) if other == letter]
    if len(places) > expected:
        return places[expected]
    return places[-1] if places else len(text) - 1


def _even_layout(num_stages: int, inventory: Inventory) -> str:
    """Return a layout of that many stages with the model's layers distributed evenly."""
    base, extra = divmod(inventory.num_layers, num_stages)
    stages = ["t" * (base + (stage < extra)) for stage in range(num_stages)]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * inventory.num_mtp + "L"
    return write_letters(stages)
