"""Strict JSON: a UTF-8 object without duplicate keys, NaN, -0 or lone surrogates."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from manifests.errors import SourceError

MOST_VALUES = 2_000_000  # in one document; each takes up to 200 bytes as a Python object
MOST_CONFIG_VALUES = 100_000
MAX_CONFIG_NBYTES = 16 << 20
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_FLOAT = "__float__"  # the tag that transformers writes for numbers that JSON lacks: {"__float__": "Infinity"}
_MINUS_ZERO = re.compile(rb"-0(?![\d.eE])")


def parse_config(text: bytes, where: str) -> dict[str, Any]:
    """Parse the config of a model or a tokenizer: an object of at most `MOST_CONFIG_VALUES` values.

    `Infinity`, `-Infinity` and `NaN`, which transformers reads, become the tags that it writes for them, so that the
    config can be written as JSON; see `with_floats`.
    """
    return _parse(text, where, MOST_CONFIG_VALUES, lambda name: {_FLOAT: name})


def with_floats(value: Any) -> Any:
    """Return a copy of a config in which numbers that JSON lacks are numbers."""
    if isinstance(value, Mapping):
        if value.keys() == {_FLOAT} and value[_FLOAT] in ("Infinity", "-Infinity", "NaN"):
            return float(value[_FLOAT])
        return {name: with_floats(item) for name, item in value.items()}
    return [with_floats(item) for item in value] if isinstance(value, list) else value


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object of the file `where`."""
    return _parse(text, where, MOST_VALUES, _no_constant)


def _parse(text: bytes, where: str, most_values: int, constant: Callable[[str], Any]) -> dict[str, Any]:
    if _has_more_values(text, most_values):
        problem = f"expected at most {most_values:,} JSON values, found more"
        hint = "a header of so many tensors is not supported: save them in more shards; other files are damaged"
        raise SourceError(where, problem, hint, code="source.too-many-values")
    try:
        document = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=constant,
            parse_float=lambda digits: _float(digits, constant),
            parse_int=_no_minus_zero if _MINUS_ZERO.search(text) else None,  # other parsers read it as a float
        )
        if _SURROGATE.search(text):  # half a character, which cannot be encoded
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError as error:
        raise SourceError(where, "JSON is nested too deeply", code="source.json-too-deep") from error
    except ValueError as error:  # UnicodeError and JSONDecodeError too
        problem = f"invalid JSON: {error}" if text.strip() else "is empty: expected JSON"
        raise SourceError(where, problem, "correct it, or download it again", code="source.not-json") from error
    if not isinstance(document, dict):
        raise SourceError(where, f"expected a JSON object, found {kind_of(document)}", code="source.not-an-object")
    return document


def kind_of(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _has_more_values(text: bytes, most: int) -> bool:
    """Whether a document has more than `most` values, counted by what precedes them, outside of strings."""
    if _openers(text, 0, len(text)) <= most:  # in strings too, which is quicker
        return False
    count = at = 0
    for string in _STRING.finditer(text):
        count += _openers(text, at, string.start())
        at = string.end()
        if count > most:
            return True
    return count + _openers(text, at, len(text)) > most


def _openers(text: bytes, begin: int, end: int) -> int:
    return sum(text.count(opener, begin, end) for opener in (b",", b"[", b"{"))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"duplicate key {key!r}")
        table[key] = value
    return table


def _no_minus_zero(digits: str) -> int:
    if digits == "-0":
        raise ValueError("-0 is not an integer")
    return int(digits)


def _float(digits: str, constant: Callable[[str], Any]) -> Any:
    value = float(digits)
    return value if math.isfinite(value) else constant("Infinity" if value > 0 else "-Infinity")


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not allowed")
