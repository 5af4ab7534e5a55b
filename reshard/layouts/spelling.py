"""Reads a layout in any spelling, recognized by its form, such as a Megatron string.

That is Megatron-Core's `--pipeline-model-parallel-layout`: one letter per layer, `|` between stages.

Source: NVIDIA/Megatron-LM d98e8a64, `megatron/core/transformer/pipeline_parallel_layer_layout.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby

from manifests.command.neighbors import plain_characters
from manifests.errors import LayoutError
from manifests.paths import is_unicode
from reshard.formatting import counted, nearest_word, shorten
from reshard.layouts.balance import read_balance
from reshard.layouts.degrees import DEGREES, Degrees, Options, layout_of, read_words
from reshard.layouts.files import read_file
from reshard.layouts.model import InFlight, Inventory, ModuleCosts, Request, SpecError, StageLayout, error_at

MAX_SPEC = 16384  # characters
HINT = (
    "a layout is pp=N[,vpp=K], a Megatron string (Et*3|(tt|)*29,m|L), balance:params,pp=N, "
    "or a .toml or .json file of module lists"
)
SPLIT_KEYS = (*DEGREES, "first", "last", "layers-per-stage")


def parse_layout(
    spec: str,
    inventory: Inventory,
    *,
    num_ranks: int | None = None,
    costs: Mapping[str, ModuleCosts] | None = None,
    in_flight: InFlight | None = None,
) -> StageLayout:
    """Read a layout in any spelling.

    `num_ranks` is for spellings without ranks (a Megatron string, a file); without it each stage has its own.
    `costs` has, under `params`, `bytes`, `flops`, `time` or `memory`, the cost of every module. With `in_flight`,
    a memory limit counts the activations that each stage keeps.
    """
    if not spec.strip():
        raise SpecError("layout", "expected a layout, found nothing", HINT, code="layout.empty")
    if len(spec) > MAX_SPEC:
        problem = f"expected at most {MAX_SPEC} characters, found {len(spec)}"
        raise SpecError("layout", problem, "write the layout to a .toml file", code="layout.too-long")
    layout = _reader(spec)(
        Request(spec=spec, inventory=inventory, num_ranks=num_ranks, costs=costs, in_flight=in_flight)
    )
    if not is_unicode(spec):  # possible for a file name, but not representable in a manifest
        raise LayoutError("layout", "is not valid UTF-8", "rename the file", code="layout.not-unicode")
    return layout


def names_file(spec: str) -> bool:
    """Return whether a layout is spelled as the path of a file."""
    return spec.strip().lower().endswith((".toml", ".json"))


def _reader(spec: str) -> Callable[[Request], StageLayout]:
    text = spec.strip()
    if names_file(spec):
        return read_file
    if reader := _READERS.get(first := _first_word(text)):
        return reader
    if "|" in text or text[0] in "E(" or set(text) <= set(LETTERS + "*(),0123456789 "):
        return read_megatron
    typed = _RUN_TOGETHER.sub(r"\1=\2", plain_characters(text).strip("\"'").lower())
    nearest = typed if _first_word(typed) in _READERS else nearest_word(first, _READERS)
    hint = f"did you mean {nearest}? {HINT}" if nearest else HINT
    raise SpecError("layout", f"unknown layout {shorten(spec)!r}", hint, code="layout.unknown-spelling")


def _first_word(text: str) -> str:
    word = _FIRST_WORD.match(text)
    return word[1] + word[2] if word else text


def split_layers(num_stages: int, num_layers: int, first: int = 1, last: int = 1) -> tuple[int, ...]:
    """Return the number of decoder layers of each stage.

    The embedding counts as `first` layers, norm and head as `last`; all are distributed evenly, the
    remainder on the earliest stages.
    """
    if num_stages == 1:
        return (num_layers,)
    effective = num_layers + first + last
    base, extra = divmod(effective, num_stages)
    if num_stages > effective:
        parts = f"{counted(num_layers, 'layer')}, first={first} and last={last}"
        raise ValueError(f"expected at most {counted(effective, 'stage')} ({parts}), found {num_stages}")
    for key, weight in (("first", first), ("last", last)):
        if weight > base:
            raise ValueError(f"{key}={weight} exceeds the smallest stage, which has {base}")
    counts = [base + (stage < extra) for stage in range(num_stages)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def read_split(request: Request) -> StageLayout:
    """Read `pp=N[,vpp=K][,style=loop|v][,first=A][,last=B][,layers-per-stage=L][,schedule=NAME]`.

    MTP layers are on the head's stage, Megatron's default; torchtitan does not split them.
    """
    options = Options(request, read_words(request.spec), SPLIT_KEYS)
    degrees = Degrees.read(options)
    inventory = request.inventory
    first, last = options.count("first", 0), options.count("last", 0)
    first, last = 1 if first is None else first, 1 if last is None else last
    effective = inventory.num_layers + first + last
    num_stages = None
    if layers_per_stage := options.count("layers-per-stage"):
        num_stages = -(-effective // layers_per_stage)
        _check_layers_per_stage(options, degrees, layers_per_stage, effective)
    num_stages = degrees.placement(request, num_stages).num_stages
    try:
        counts = split_layers(num_stages, inventory.num_layers, first, last)
    except ValueError as error:
        key = "pp" if num_stages > effective else "first" if str(error).startswith("first") else "last"
        most = effective // max(first, last, 1)
        per_rank = num_stages // (degrees.num_ranks or num_stages)
        hint = f"at most pp={most // per_rank}" + (f" with vpp={per_rank}" if per_rank > 1 else "")
        raise options.error(
            key, str(error), hint if most >= per_rank else "lower vpp", code="layout.uneven-split"
        ) from error
    cuts = list(accumulate(counts, initial=inventory.num_inputs))[1:-1]
    return layout_of(request, (0, *cuts, len(inventory.modules)), degrees)


def _check_layers_per_stage(options: Options, degrees: Degrees, size: int, effective: int) -> None:
    """Raise if `size` layers per stage make stages that are not a multiple of the ranks."""
    num_ranks = degrees.num_ranks
    num_stages = -(-effective // size)
    if num_ranks is None or num_stages % num_ranks == 0:
        return
    fitting = [other for other in range(1, effective + 1) if -(-effective // other) % num_ranks == 0]
    nearest = min(fitting, key=lambda other: (abs(other - size), other), default=None)
    raise options.error(
        "layers-per-stage",
        f"layers-per-stage={size} makes {counted(num_stages, 'stage')}, not a multiple of {num_ranks} ranks",
        f"layers-per-stage={nearest} makes {-(-effective // nearest)}" if nearest else "lower pp",
        code="layout.indivisible-stages",
    )


_READERS: Mapping[str, Callable[[Request], StageLayout]] = {
    **dict.fromkeys((f"{key}=" for key in SPLIT_KEYS), read_split),
    "balance:": read_balance,
}
_RUN_TOGETHER = re.compile(rf"\b({'|'.join(SPLIT_KEYS)})[ :-]?(\d+)")
_FIRST_WORD = re.compile(r"\s*([A-Za-z-]+)\s*([=:]|(?=,|$))")


LETTERS = "EtmL"
MAX_LETTERS = 16384  # bars included; more stages and layers than any model has
LAYERS = {"t": "decoder layer", "m": "MTP layer"}
_ENDS = "E (embedding) comes first, L (norm and head) last, each once"

# Megatron's two passes, in order: (body)*n, then x*n.
_PASSES = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_CASES = {"e": "E", "T": "t", "M": "m", "l": "L"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """`text` has only layer letters and bars; `text[i]` is at `origins[i]` in the spec."""

    text: str
    origins: list[int]


def read_megatron(request: Request) -> StageLayout:
    """Read a layout string. Stage i is on rank i % PP; without a number of ranks, every stage has its own."""
    expansion = expand(request.spec)
    stages = expansion.text.split("|")
    places = [at for at, letter in enumerate(expansion.text) if letter != "|"]
    if not places:
        raise error_at(request.spec, 0, "expected layers, found none", _ENDS, code="layout.empty")
    degrees = Degrees(num_ranks=request.num_ranks)
    degrees.placement(request, len(stages))  # before anything is done per stage
    _check_ends(request, expansion, places)
    _check_layers(request, expansion, len(stages))
    inventory = request.inventory
    widths = {"E": inventory.num_inputs, "t": 1, "m": 1, "L": len(inventory.modules) - inventory.layers_stop}
    sizes = [sum(widths[letter] for letter in stage) for stage in stages]
    return layout_of(request, tuple(accumulate(sizes, initial=0)), degrees)


def expand(spec: str) -> Expansion:
    """Write out the repeats as Megatron does: drop commas, and white space, then one pass for groups, one for letters.

    Source: `parse_str_to_list`.
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
            raise error_at(spec, expansion.origins[place], problem, _ENDS, code="layout.misplaced-end")
    for letter, second in (("E", text.find("E", places[0] + 1)), ("L", text.find("L", 0, places[-1]))):
        if second >= 0:
            raise error_at(
                spec,
                expansion.origins[second],
                f"{letter} must occur exactly once",
                _ENDS,
                code="layout.misplaced-end",
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
