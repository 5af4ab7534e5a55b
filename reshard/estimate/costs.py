"""The cost of each module, for balancing layouts and for plans."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import InputError, Parameter
from manifests.jsontext import kind_of, parse_json_object
from manifests.models import ModelShape
from manifests.models.shape import BACKWARD_SHARE
from manifests.store import read_small_file
from reshard.formatting import some


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleTime:
    """Time of one microbatch in a module: in seconds if measured, else in FLOPs."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def costs_of(
    shape: ModelShape,
    *,
    seq_len: int,
    nbytes: Mapping[str, int],
    measured: Mapping[str, ModuleTime] | None = None,
) -> dict[str, dict[str, float]]:
    """Return the costs of `balance:COST` for every module, except memory: `costs["flops"]["lm_head"]`.

    `nbytes` are the sizes of stored tensors by FQN; for memory see `manifests.models.memory.memory_of`.

    Raises:
        InputError: `measured` lacks a module, or has one that the model does not have.
    """
    times = times_of(shape, seq_len, measured)
    return {
        "params": dict[str, float](params_of(shape)),
        "bytes": dict[str, float](nbytes_of(shape, nbytes)),
        "flops": dict[str, float](flops_of(shape, seq_len)),
        "time": {module: time.total for module, time in times.items()},
    }


def params_of(shape: ModelShape) -> dict[str, int]:
    """Count each module's parameters; a tied one counts in every module that uses it."""
    return {module: sum(map(shape.count_params, fqns)) for module, fqns in shape.by_module().items()}


def nbytes_of(shape: ModelShape, nbytes: Mapping[str, int]) -> dict[str, int]:
    """Return each module's bytes, from those of the stored tensors.

    A tied tensor that is not stored counts as the copy that its stage gets.
    """
    sizes = {fqn: size for fqn, size in nbytes.items() if fqn in shape.tensors}
    for group in shape.ties:
        stored = next((sizes[fqn] for fqn in group if fqn in sizes), 0)
        sizes.update({fqn: stored for fqn in group if fqn not in sizes})
    return {module: sum(sizes.get(fqn, 0) for fqn in fqns) for module, fqns in shape.by_module().items()}


def flops_of(shape: ModelShape, seq_len: int) -> dict[str, int]:
    """Return each module's forward FLOPs per token; see `manifests.models.shape.Work`."""
    return {module: shape.work[module].forward_flops(seq_len) for module in shape.modules}


def times_of(
    shape: ModelShape, seq_len: int, measured: Mapping[str, ModuleTime] | None = None
) -> dict[str, ModuleTime]:
    """Return each module's time: as measured, else its FLOPs.

    Raises:
        InputError: `measured` lacks a module, or has one that the model does not have.
    """
    if measured is None:
        return {
            module: ModuleTime(forward=flops, backward=BACKWARD_SHARE * flops)
            for module, flops in flops_of(shape, seq_len).items()
        }
    if missing := [module for module in shape.modules if module not in measured]:
        raise InputError(
            Parameter("assumed.measured"),
            f"missing the time of {some(missing)}",
            f"measure every module of {shape.architecture}",
            code="options.cost-modules",
        )
    if unknown := [module for module in measured if module not in shape.modules]:
        raise InputError(
            Parameter("assumed.measured"),
            f"{shape.architecture} has no {some(unknown)}",
            "the times may be of another model",
            code="options.cost-modules",
        )
    return {module: measured[module] for module in shape.modules}


def read_times(path: Path) -> dict[str, ModuleTime]:
    """Read measured times from a file; see `parse_times`."""
    return parse_times(read_small_file(path), str(path))


def parse_times(text: bytes, where: str) -> dict[str, ModuleTime]:
    """Read `{"version": 1, "modules": {"model.layers.0": {"forward_s": 0.01, "backward_s": 0.02}}}`.

    Units: seconds for one microbatch.
    Raises:
        InputError: invalid JSON, another version, or an invalid time.
    """
    document = parse_json_object(text, where)
    if document.get("version") != 1 or isinstance(document["version"], bool):
        raise InputError(
            f"{where}: version", f"expected 1, found {document.get('version')!r}", code="options.cost-file"
        )
    modules = _object(document.get("modules"), f"{where}: modules")
    return {
        module: ModuleTime(
            forward=_seconds(times, "forward_s", f"{where}: modules[{module!r}]"),
            backward=_seconds(times, "backward_s", f"{where}: modules[{module!r}]"),
        )
        for module, times in modules.items()
    }


def _seconds(entry: object, name: str, where: str) -> float:
    seconds = _object(entry, where).get(name)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= sys.float_info.max:
        raise InputError(
            f"{where}.{name}", f"expected seconds, 0 or more, found {str(seconds)[:80]}", code="options.cost-file"
        )
    return float(seconds)


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InputError(where, f"expected an object, found {kind_of(value)}", code="options.cost-file")
    return value
