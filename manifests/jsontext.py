"""Strict JSON: UTF-8, an object, no key twice, no NaN, no -0, no half character."""

from __future__ import annotations

import json
import re
from typing import Any

from manifests.errors import InputError

__all__ = ["kind_of", "parse_json_object"]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MINUS_ZERO = re.compile(rb"-0(?![\d.eE])")


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object that `where` holds.

    Raises:
        InputError: not UTF-8, not JSON, nested too deeply, a key twice, -0, a lone surrogate, or no object.
    """
    try:
        document = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_int=_no_minus_zero if _MINUS_ZERO.search(text) else None,  # others take it for a fraction
        )
        if _SURROGATE.search(text):  # half a character, which could not be written again
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError as error:
        raise InputError(where, "is nested too deeply") from error
    except ValueError as error:  # UnicodeError and JSONDecodeError too
        raise InputError(where, f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InputError(where, f"expected a JSON object, found {kind_of(document)}")
    return document


def kind_of(found: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(found), "a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"key {key!r} stands twice")
        table[key] = value
    return table


def _no_minus_zero(digits: str) -> int:
    if digits == "-0":
        raise ValueError("-0 is no integer")
    return int(digits)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
