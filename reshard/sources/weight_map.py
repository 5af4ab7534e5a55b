"""Reads the index of a sharded checkpoint entry by entry, so that memory is that of its names alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from manifests.errors import SourceError
from manifests.headertext import PAIR, STRING, read_string
from manifests.jsontext import kind_of, parse_json_object

__all__ = ["read_weight_map"]

_S = rb"[ \t\n\r]*+"
_SCALAR = rb"(?:" + STRING + rb"|[0-9][0-9.eE+-]*+|true|false|null)"
_MEMBER = STRING + _S + rb":" + _S + _SCALAR + _S
_FLAT = rb"\{" + _S + rb"(?:" + _MEMBER + rb"(?:," + _S + _MEMBER + rb")*+)?\}"
# `metadata` has numbers and strings, and comes before or after the map.
_METADATA = rb'"metadata"' + _S + rb":" + _S + rb"(?P<metadata>" + _FLAT + rb")" + _S
_MAP = rb'"weight_map"' + _S + rb":" + _S + rb"\{" + _S
_BEFORE = re.compile(_S + rb"\{" + _S + rb"(?:" + _METADATA + rb"," + _S + rb")?" + _MAP)
_AFTER = re.compile(rb"(?:," + _S + _METADATA + rb")?\}" + _S + rb"\Z")


def read_weight_map(raw: bytes, where: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the file of each tensor in the index. Keys that are in `names` are the same objects as there.

    Raises:
        SourceError: not a JSON object of file names.
    """
    read = _read_pairs(raw, where, names)
    if read is not None:
        return read
    weight_map = parse_json_object(raw, where).get("weight_map")  # unusual spelling, or invalid
    if not isinstance(weight_map, dict):
        problem = f"expected an object of file names, found {kind_of(weight_map)}"
        raise SourceError(f"{where}: weight_map", problem, code="source.bad-index")
    for fqn, listed in weight_map.items():
        if not isinstance(listed, str):
            place = f"{where}: weight_map[{fqn[:80]!r}]"
            raise SourceError(place, f"expected a file name, found {kind_of(listed)}", code="source.bad-index")
    return weight_map


def _read_pairs(raw: bytes, where: str, names: Mapping[str, str]) -> dict[str, str] | None:
    """Return the map of an index in the usual spelling; None for any other."""
    before = _BEFORE.match(raw)
    if before is None:
        return None
    found: dict[str, str] = {}
    files: dict[bytes, str] = {}
    at, following, count = before.end(), b",", 0
    while following == b",":
        pair = PAIR.match(raw, at)
        if pair is None:
            return None
        fqn, file = read_string(pair[1]), files.get(pair[2])
        if file is None:
            file = read_string(pair[2])
        if fqn is None or file is None:
            return None
        files[pair[2]] = file
        found[names.get(fqn, fqn)] = file
        at, following, count = pair.end(), pair[3], count + 1
    after = _AFTER.match(raw, at)
    if after is None or count > len(found) or (before["metadata"] and after["metadata"]):
        return None
    parse_json_object(before["metadata"] or after["metadata"] or b"{}", f"{where}: metadata")
    return found
