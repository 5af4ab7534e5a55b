"""`times.json`: the measured seconds of each module for a microbatch, which training writes and planning reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manifests.brief import brief
from manifests.errors import InputError
from manifests.jsontext import kind_of, parse_json_object
from manifests.store import read_small_file

TIMES_NAME = "times.json"
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleTime:
    """Time of one microbatch in a module: in seconds if measured, else in FLOPs."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTimes:
    """Times by module, in seconds, and the options with which they were measured, such as `seq_len`."""

    modules: Mapping[str, ModuleTime]
    how: Mapping[str, Any] = field(default_factory=dict)

    __repr__ = brief

    def encode(self) -> bytes:
        """Return the text of `times.json`."""
        modules = {
            module: {"forward_s": time.forward, "backward_s": time.backward} for module, time in self.modules.items()
        }
        document = {"version": _VERSION, "measured": dict(self.how), "modules": modules}
        return (json.dumps(document, indent=1) + "\n").encode()


def read_times(path: Path) -> MeasuredTimes:
    """Read measured times from a file; see `parse_times`."""
    return parse_times(read_small_file(path), str(path))


def parse_times(text: bytes, where: str) -> MeasuredTimes:
    """Read `{"version": 1, "modules": {"model.layers.0": {"forward_s": 0.01, "backward_s": 0.02}}}`.

    "measured", an object, may say how they were measured. Units: seconds for one microbatch.

    Raises:
        InputError: invalid JSON, another version, or an invalid time.
    """
    document = parse_json_object(text, where)
    if document.get("version") != _VERSION or isinstance(document["version"], bool):
        raise InputError(
            f"{where}: version", f"expected {_VERSION}, found {document.get('version')!r}", code="options.cost-file"
        )
    modules = _object(document.get("modules"), f"{where}: modules")
    times = {
        module: ModuleTime(
            forward=_seconds(entry, "forward_s", f"{where}: modules[{module!r}]"),
            backward=_seconds(entry, "backward_s", f"{where}: modules[{module!r}]"),
        )
        for module, entry in modules.items()
    }
    return MeasuredTimes(modules=times, how=_object(document.get("measured", {}), f"{where}: measured"))


def _seconds(entry: object, name: str, where: str) -> float:
    seconds = _object(entry, where).get(name)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= sys.float_info.max:
        raise InputError(
            f"{where}.{name}", f"expected seconds, 0 or more, found {str(seconds)[:80]}", code="options.cost-file"
        )
    return float(seconds)


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(where, f"expected an object, found {kind_of(value)}", code="options.cost-file")
    return value
