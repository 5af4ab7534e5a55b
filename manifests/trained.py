"""`trained.json`, of a run that froze parameters: the names of the others, which alone have optimizer state."""

from __future__ import annotations

import json
from collections.abc import Iterable

from manifests.errors import ManifestError
from manifests.jsontext import parse_json_object

TRAINED_NAME = "trained.json"


def encode_trained(fqns: Iterable[str]) -> bytes:
    return (json.dumps({"version": 1, "fqns": sorted(fqns)}, indent=1) + "\n").encode()


def decode_trained(text: bytes, where: str) -> frozenset[str]:
    record = parse_json_object(text, where)
    fqns = record.get("fqns")
    if record.get("version") != 1 or not isinstance(fqns, list) or not all(isinstance(fqn, str) for fqn in fqns):
        raise ManifestError(where, "expected version 1 with a list of fqns", code="manifest.bad-source-record")
    return frozenset(fqns)
