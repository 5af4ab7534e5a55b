"""The cost of each module, for balancing layouts and for plans."""

from __future__ import annotations

from collections.abc import Mapping

from manifests.errors import InputError, Parameter
from manifests.models import ModelShape
from manifests.models.shape import BACKWARD_SHARE
from manifests.module_times import ModuleTime
from reshard.formatting import some


def costs_of(
    shape: ModelShape,
    *,
    seq_len: int,
    nbytes: Mapping[str, int],
    measured: Mapping[str, ModuleTime] | None = None,
) -> dict[str, dict[str, float]]:
    """Return the costs of `balance:COST` for every module, except memory: `costs["flops"]["lm_head"]`.

    `nbytes` are the sizes of stored tensors by FQN; for memory see `manifests.models.memory.memory_of`.
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
    """Return each module's time: as measured, else its FLOPs."""
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
