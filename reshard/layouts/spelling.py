"""Reads a layout in any spelling, recognized by its form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import accumulate

from manifests.errors import LayoutError, Parameter, UsageError
from manifests.paths import is_unicode
from reshard.formatting import counted, nearest_word, shorten
from reshard.layouts.balance import read_balance
from reshard.layouts.degrees import DEGREES, Degrees, Options, layout_of, read_words
from reshard.layouts.files import read_file
from reshard.layouts.inventory import Inventory
from reshard.layouts.megatron import LETTERS, read_megatron
from reshard.layouts.model import InFlight, ModuleCosts, Request, SpecError, StageLayout

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

    Raises:
        LayoutError: an invalid spec, or one without each of the model's modules exactly once, in order.
        UsageError: `num_ranks` is below 1 or differs from the spec's.
    """
    if num_ranks is not None and num_ranks < 1:
        raise UsageError(Parameter("pp"), f"expected at least 1 rank, found {num_ranks}", code="layout.bad-option")
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


def _reader(spec: str) -> Callable[[Request], StageLayout]:
    text = spec.strip()
    if text.lower().endswith((".toml", ".json")):
        return read_file
    word = _FIRST_WORD.match(text)
    if word and (reader := _READERS.get(word[1] + word[2])):
        return reader
    if "|" in text or text[0] in "E(" or set(text) <= set(LETTERS + "*(),0123456789 "):
        return read_megatron
    first = word[1] + word[2] if word else text
    separated = _RUN_TOGETHER.sub(r"\1=\2", text)
    nearest = separated if separated != text else nearest_word(first, _READERS)
    hint = f"did you mean {nearest}? {HINT}" if nearest else HINT
    raise SpecError("layout", f"unknown layout {shorten(spec)!r}", hint, code="layout.unknown-spelling")


def split_layers(num_stages: int, num_layers: int, first: int = 1, last: int = 1) -> tuple[int, ...]:
    """Return the number of decoder layers of each stage.

    The embedding counts as `first` layers, norm and head as `last`; all are distributed evenly, the
    remainder on the earliest stages.

    Raises:
        ValueError: a stage would be empty, or `first` or `last` exceeds its stage.
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

    Raises:
        LayoutError: an unknown key, an invalid value, or a split that torchtitan refuses.
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
