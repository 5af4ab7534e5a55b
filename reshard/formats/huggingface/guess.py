"""A first description of a model that nobody has described, from the names in its files, for its user to correct."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_COUNTS = re.compile(r"layer|depth|block")  # in names of config fields
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "model_dim", "hidden_dim", "width")
_BEFORE = re.compile(r"emb|wte|wpe|tok|pos|vis|image|audio|patch|proj_in|project_in")
_EMBEDDING = re.compile(r"tok|word|wte|embed|emb")
_HEAD = re.compile(r"head|logits|unembed|output|to_vocab")
_TOWER = re.compile(r"vis|image|audio|speech|enc")  # not a decoder's layers, as far as a name tells
_MOST_MODULES = 12  # listed; a longer list is cut short


@dataclass(frozen=True, kw_only=True, slots=True)
class Guess:
    """The text of a file for `--model`, and the lists of layers that it could mean, if there are several."""

    text: str
    alike: tuple[str, ...]


def guess_description(config: Mapping[str, object], names: Collection[str]) -> Guess | None:
    """Return a description of a model with these tensors; None if no list of layers is among them."""
    lists = _lists_of(names)
    if not lists:
        return None
    fields = {
        value: name for name, value in reversed(list(config.items())) if type(value) is int and _COUNTS.search(name)
    }
    counted = {name: num for name, num in lists.items() if num in fields} or lists
    longest = max(counted.values())
    alike = sorted(
        (name for name, num in counted.items() if num == longest), key=lambda name: bool(_TOWER.search(name))
    )
    layers, count = alike[0], fields.get(longest)
    others = _modules_outside(names, layers, lists)
    inputs = [module for module in others if _BEFORE.search(module.lower())]
    outputs = sorted((module for module in others if module not in inputs), key=lambda name: bool(_HEAD.search(name)))
    lines = [
        _line("inputs", inputs[:_MOST_MODULES]),
        _line("layers", layers) + f"  # {longest} layers" + _also(alike),
        _line("outputs", outputs[:_MOST_MODULES]),
        _line("count", count or "num_hidden_layers") + ("" if count else "  # the field of config.json that says it"),
        _line("width", next((name for name in _WIDTHS if type(config.get(name)) is int), "hidden_size")),
    ]
    embedding = next((name for name in names if name.rpartition(".")[0] in inputs and _EMBEDDING.search(name)), None)
    if embedding is not None and not any(map(_HEAD.search, outputs)):
        lines[2] = _line("outputs", [*outputs, "lm_head"]) + "  # lm_head is not stored: tied"
        lines += [_line("ties", [[embedding, "lm_head.weight"]]), "tied = true"]
    return Guess(text="\n".join(lines), alike=tuple(alike) if len(alike) > 1 else ())


def _lists_of(names: Collection[str]) -> dict[str, int]:
    """Return the numbered lists that are in no other list, and their lengths, if they begin at 0 and have no gap."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        words = name.split(".")
        at = next((at for at, word in enumerate(words[:-1]) if at and word.isdecimal()), None)
        if at is not None:
            numbers.setdefault(".".join(words[:at]), set()).add(int(words[at]))
    return {name: len(found) for name, found in numbers.items() if max(found) + 1 == len(found)}


def _modules_outside(names: Collection[str], layers: str, lists: Collection[str]) -> list[str]:
    """Return the modules that own what is not in the list of layers; another list counts as one module."""
    others = [f"{name}." for name in lists if name != layers]
    found: dict[str, None] = {}
    for name in names:
        if name.startswith(f"{layers}."):
            continue
        around = next((other for other in others if name.startswith(other)), None)
        found.setdefault(around.removesuffix(".") if around else name.rpartition(".")[0] or name)
    return [module for module in found if not any(module.startswith(f"{other}.") for other in found)]


def _line(key: str, value: object) -> str:
    return f"{key} = {json.dumps(value)}"  # strings and lists of them are written in TOML as in JSON


def _also(alike: Sequence[str]) -> str:
    return f"; so has {', '.join(alike[1:])}" if len(alike) > 1 else ""
