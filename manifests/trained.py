"""Auxiliary files of a training checkpoint, which no export of its weights has.

`trained.json` is of a run that froze parameters: the names of the others, which alone have optimizer state.
`optimizer-steps.json` has the step counts that are not `training.step`: of parameters without a gradient in some steps.
`skipped-documents.json` and `dataset-state.json` say where the run is in its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from manifests.errors import ManifestError
from manifests.jsontext import parse_json_object

TRAINED_NAME, STEPS_NAME = "trained.json", "optimizer-steps.json"
SKIPPED_NAME, STATE_NAME = DATA_FILES = "skipped-documents.json", "dataset-state.json"
RUN_FILES = (TRAINED_NAME, STEPS_NAME, *DATA_FILES)


def encode_trained(fqns: Iterable[str]) -> bytes:
    return (json.dumps({"version": 1, "fqns": sorted(fqns)}, indent=1) + "\n").encode()


def decode_trained(text: bytes, where: str) -> frozenset[str]:
    record = parse_json_object(text, where)
    fqns = record.get("fqns")
    if record.get("version") != 1 or not isinstance(fqns, list) or not all(isinstance(fqn, str) for fqn in fqns):
        raise ManifestError(where, "expected version 1 with a list of fqns", code="manifest.bad-source-record")
    return frozenset(fqns)


def encode_steps(steps: Mapping[str, int]) -> bytes:
    return (json.dumps({"version": 1, "steps": dict(sorted(steps.items()))}, indent=1) + "\n").encode()


def decode_steps(text: bytes, where: str) -> dict[str, int]:
    """Return how many optimizer steps parameters took, by FQN."""
    record = parse_json_object(text, where)
    steps = record.get("steps")
    if record.get("version") != 1 or not isinstance(steps, dict) or not all(map(_is_count, steps.values())):
        raise ManifestError(where, "expected version 1 with steps by FQN", code="manifest.bad-source-record")
    return steps


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53
