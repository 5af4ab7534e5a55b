"""Reads a layout in any spelling, recognized by its form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from manifests.errors import LayoutError, UsageError
from manifests.paths import is_unicode
from reshard.layout.balance import read_balance
from reshard.layout.deepspeed import read_uniform
from reshard.layout.expansion import LETTERS
from reshard.layout.files import read_cuts, read_file
from reshard.layout.inventory import Inventory
from reshard.layout.megatron import read_megatron
from reshard.layout.model import InFlight, ModuleCosts, Request, StageLayout
from reshard.layout.split import SPLIT_KEYS, read_split
from reshard.layout.wording import SpecError, nearest_word, shorten

MAX_SPEC = 16384  # characters
HINT = (
    "a layout is pp=N[,vpp=K], a Megatron string (Et*3|(tt|)*29,m|L), balance:params,pp=N, uniform,pp=N, "
    "cut=model.layers.8, or a .toml or .json file of module lists"
)

_READERS: Mapping[str, Callable[[Request], StageLayout]] = {
    **dict.fromkeys((f"{key}=" for key in SPLIT_KEYS), read_split),
    "cut=": read_cuts,
    "uniform": read_uniform,
    "parameters": read_balance,
    "balance:": read_balance,
    "type:": read_balance,
}
_RUN_TOGETHER = re.compile(rf"\b({'|'.join(SPLIT_KEYS)})[ :-]?(\d+)")
_FIRST_WORD = re.compile(r"\s*([A-Za-z-]+)\s*([=:]|(?=,|$))")


def parse_layout(
    spec: str,
    inventory: Inventory,
    *,
    num_ranks: int | None = None,
    strict_megatron: bool = False,
    costs: Mapping[str, ModuleCosts] | None = None,
    in_flight: InFlight | None = None,
) -> StageLayout:
    """Read a layout in any spelling.

    `num_ranks` is for spellings without ranks (a Megatron string, cuts, a file); without it each stage has
    its own. `strict_megatron` refuses what Megatron would. `costs` has, under `params`, `bytes`, `flops`,
    `time` or `memory`, the cost of every module. With `in_flight`, a memory limit counts the activations
    that each stage keeps.

    Raises:
        LayoutError: an invalid spec, or one without each of the model's modules exactly once, in order.
        UsageError: `num_ranks` is below 1 or differs from the spec's; `strict_megatron` for another spelling.
    """
    if num_ranks is not None and num_ranks < 1:
        raise UsageError("--pp", f"expected at least 1 rank, found {num_ranks}", code="layout.bad-option")
    if not spec.strip():
        raise SpecError("layout", "expected a layout, found nothing", HINT, code="layout.empty")
    if len(spec) > MAX_SPEC:
        problem = f"expected at most {MAX_SPEC} characters, found {len(spec)}"
        raise SpecError("layout", problem, "write the layout to a .toml file", code="layout.too-long")
    reader = _reader(spec)
    if strict_megatron and reader is not read_megatron:
        raise UsageError(
            "--strict-megatron",
            f"expected a Megatron string, found {shorten(spec)}",
            "leave it out",
            code="layout.not-megatron",
        )
    layout = reader(
        Request(
            spec=spec,
            inventory=inventory,
            num_ranks=num_ranks,
            strict_megatron=strict_megatron,
            costs=costs,
            in_flight=in_flight,
        )
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
