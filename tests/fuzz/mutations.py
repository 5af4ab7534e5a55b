"""Mutations of JSON that stay JSON, to get a fuzzer past the parser: nodes replaced, moved, doubled, taken out."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

_SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 4, 7, 8, 64, 100, 4096, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30,
    -1, -0.0, 0.0, 0.5, 1.0, 1e308, -1e308, 1e999, float("nan"), "", "a", "b", "..", "/", "../a", "/etc/passwd", "a/b",
    "\0", "\x1b[2J", "\x7f", "é", "\U0001f600", "\ud800", "blake3:" + "0" * 64, "blake3:" + "0" * 63 + "G", "weights",
    "exp_avg", "exp_avg_sq", "loop", "v", "__metadata__", "U8", "F4", "F6_E2M3", "BF16", "F32", "F64",
    "model.safetensors", "a.safetensors", "model.layers.0",
)  # fmt: skip
_SPELLINGS = ("-0", "1e0", "1E2", "0.1e1", "01", "+1", "1.", ".5", "Infinity", "0x1", '"\\u0000"', '"\\ud83d\\ude00"')
_MOST_TAKEN = 20_000  # characters


class _Pairs(list[tuple[str, Any]]):
    """An object, as pairs: a key may stand twice."""


class _Raw(str):
    """A piece of text that stands for itself."""


def mutate_json(text: bytes, chance: Random) -> bytes | None:
    """Give another document that is much like this one; None when this one is none."""
    try:
        return _mutated([json.loads(text, object_pairs_hook=_Pairs)], chance)
    except (ValueError, RecursionError):
        return None


def _mutated(root: list[Any], chance: Random) -> bytes:
    for _ in range(chance.choice((1, 1, 1, 2, 3, 5))):
        places = list(_places(root))
        if not places:
            break
        holder, index = chance.choice(places)
        chance.choice(_WAYS)(holder, index, places, chance)
    written = _write(root[0]) if root else ""
    return written[:_MOST_TAKEN].encode("utf-8", "surrogatepass")


def _places(node: list[Any]) -> Any:
    for index, item in enumerate(node):
        yield node, index
        inner = item[1] if isinstance(node, _Pairs) else item
        if isinstance(inner, list):
            yield from _places(inner)


def _get(holder: list[Any], index: int) -> Any:
    return holder[index][1] if isinstance(holder, _Pairs) else holder[index]


def _put(holder: list[Any], index: int, node: Any) -> None:
    holder[index] = (holder[index][0], node) if isinstance(holder, _Pairs) else node


def _replace(holder: list[Any], index: int, places: Any, chance: Random) -> None:
    _put(holder, index, chance.choice((*_SCALARS, [], _Pairs())))


def _misspell(holder: list[Any], index: int, places: Any, chance: Random) -> None:
    _put(holder, index, _Raw(chance.choice(_SPELLINGS)))


def _nudge(holder: list[Any], index: int, places: Any, chance: Random) -> None:
    found = _get(holder, index)
    if isinstance(found, int):
        _put(holder, index, found + chance.choice((-8, -2, -1, 1, 2, 8)))
    elif isinstance(found, str) and found:
        at = chance.randrange(len(found))
        _put(holder, index, found[:at] + chance.choice(("", "\0", "a", "0", "/", ".", "é")) + found[at + 1 :])


def _copy_from_elsewhere(holder: list[Any], index: int, places: Any, chance: Random) -> None:
    _put(holder, index, deepcopy(_get(*chance.choice(places))))


def _double(holder: list[Any], index: int, places: Any, chance: Random) -> None:
    if len(holder) < 50:
        holder.insert(chance.randrange(len(holder) + 1), holder[index])


def _take_out(holder: list[Any], index: int, places: Any, chance: Random) -> None:
    del holder[index]


def _rename(holder: list[Any], index: int, places: Any, chance: Random) -> None:
    if isinstance(holder, _Pairs):
        names = [str(scalar) for scalar in _SCALARS if isinstance(scalar, str)]
        others = [pair[0] for pair in holder]
        holder[index] = (chance.choice(names + others), holder[index][1])


def _wrap(holder: list[Any], index: int, places: Any, chance: Random) -> None:
    found = _get(holder, index)
    depth = chance.choice((1, 1, 2, 30))
    for _ in range(depth):
        found = [found]
    _put(holder, index, found)


_WAYS: tuple[Callable[[list[Any], int, Any, Random], None], ...] = (
    _replace, _replace, _misspell, _nudge, _nudge, _copy_from_elsewhere, _double, _take_out, _rename, _wrap,
)  # fmt: skip


def _write(node: Any) -> str:
    if isinstance(node, _Raw):
        return str(node)
    if isinstance(node, _Pairs):
        return "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{_write(value)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(_write, node)) + "]"
    return json.dumps(node, ensure_ascii=False)
