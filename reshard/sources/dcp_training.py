"""The training state of a DCP checkpoint: how far it was trained, and AdamW's state, as torchtitan saves them.

Source: torchtitan 0.3.0, torchtitan/trainer.py, components/optimizer; torch 2.13.0, get_optimizer_state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import calcsize, unpack
from typing import Any

from manifests.errors import SourceError
from manifests.schema import (
    MOMENTS,
    Holds,
    LearningRate,
    OptimizerState,
    ParameterGroup,
    TrainedDtype,
    TrainingState,
)
from reshard.archives.dcp import DcpMetadata, DcpTensor, DcpValue, read_chunks, read_values
from reshard.archives.names import METADATA_NAME
from reshard.sources.adamw import (
    ADAMW_FLAGS,
    BAD_OPTIMIZER,
    LEAVE,
    by_options,
    check_adamw,
    checked_state,
    constant_rate,
    group_of,
)
from stores.base import Folder, read_range

__all__ = ["OPTIMIZER", "SavedOptimizer", "find_optimizer", "training_state"]

OPTIMIZER = "optimizer"
_STATE, _GROUPS = "optimizer.state.", "optimizer.param_groups"
_OPTIONS = ("betas", "eps", "weight_decay", "lr")
_ALL_OPTIONS = (
    *_OPTIONS, "initial_lr", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
    "decoupled_weight_decay",
)  # fmt: skip
_COUNTS = ("train_state.step", "train_state.ntokens_seen", "lr_scheduler.last_epoch")
_MAX_NORM = 1.0  # of gradient clipping: torchtitan's default, and no checkpoint has it
_FLOATS: Mapping[str, TrainedDtype] = {"F64": "F64", "F32": "F32", "F16": "F16", "BF16": "BF16"}
_SCALARS = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}

FqnsOf = Callable[[str, DcpTensor], Iterable[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedOptimizer:
    """The optimizer state, by kind and by the name that the parameter has in it, and each parameter's options."""

    moments: Mapping[Holds, Mapping[str, DcpTensor]]
    groups: Mapping[str, Mapping[object, object]]  # the options of AdamW, by parameter
    num_steps: int

    @property
    def names(self) -> set[str]:
        """The entries of the checkpoint whose meaning is kept."""
        kinds = (*MOMENTS, "step")
        options = {f"{_GROUPS}.{fqn}.{option}" for fqn in self.groups for option in _ALL_OPTIONS}
        return {f"{_STATE}{fqn}.{kind}" for fqn in self.groups for kind in kinds} | options | {_GROUPS, *_COUNTS}


def find_optimizer(folder: Folder, saved: DcpMetadata) -> SavedOptimizer | None:
    """Return the AdamW state that a checkpoint has; None if it has none of any parameter.

    Raises:
        SourceError: a parameter has one kind of it and not the others, parameters took different numbers of steps, or
            options are missing or malformed.
    """
    found: dict[str, dict[str, DcpTensor]] = {holds: {} for holds in (*MOMENTS, "step")}
    for tensor in saved.tensors:
        fqn, _, kind = tensor.name.removeprefix(_STATE).rpartition(".")
        if tensor.name.startswith(_STATE) and kind in found:
            found[kind][fqn] = tensor
    moments: dict[Holds, Mapping[str, DcpTensor]] = {holds: found[holds] for holds in MOMENTS}
    parameters = found[MOMENTS[0]].keys() | found[MOMENTS[1]].keys()
    if not parameters:
        return None
    where = f"{folder}/{METADATA_NAME}"
    for kind, tensors in found.items():
        if lacking := sorted(parameters - tensors.keys()):
            problem = f"{lacking[0]!r} has optimizer state, but no {kind}; {len(lacking)} parameters lack it"
            raise SourceError(where, problem, LEAVE, code=BAD_OPTIMIZER)
    steps = {fqn: _num_steps(folder, tensor) for fqn, tensor in sorted(found["step"].items())}
    if len(set(steps.values())) > 1:
        few, many = min(steps, key=lambda fqn: steps[fqn]), max(steps, key=lambda fqn: steps[fqn])
        problem = f"{few!r} took {steps[few]} optimizer steps, {many!r} took {steps[many]}"
        raise SourceError(where, problem, LEAVE, code=BAD_OPTIMIZER)
    return SavedOptimizer(
        moments=moments, groups=_groups(folder, saved, sorted(parameters)), num_steps=steps.popitem()[1]
    )


def training_state(
    folder: Folder, saved: DcpMetadata, optimizer: SavedOptimizer, dtypes: Iterable[str], fqns_of: FqnsOf
) -> TrainingState:
    """Return how far the checkpoint was trained, and its optimizer's options.

    `dtypes` are those of the trained weights. The learning rate is that of the next step, and stays: a checkpoint does
    not have its schedule.

    Raises:
        SourceError: the trainer counts other steps than the optimizer, or malformed values.
    """
    values = _numbers(folder, saved, ("train_state.step", "lr_scheduler.last_epoch"))
    for name, step in values.items():
        if step != optimizer.num_steps:
            problem = f"{name} is {step}, and the optimizer took {optimizer.num_steps} steps"
            raise SourceError(f"{folder}/{METADATA_NAME}", problem, LEAVE, code=BAD_OPTIMIZER)
    counted = _numbers(folder, saved, ("train_state.ntokens_seen", "dataloader.world_size"))
    tokens, num_replicas = counted.get("train_state.ntokens_seen", 0), counted.get("dataloader.world_size", 1)
    kinds = set(dtypes)
    where = f"{folder}/{METADATA_NAME}"
    groups = _by_parameter(optimizer, fqns_of, where)
    found = TrainingState(
        step=optimizer.num_steps,
        num_tokens=tokens * num_replicas,
        dtype=_FLOATS.get(kinds.pop()) if len(kinds) == 1 else None,
        learning_rate=_rate(optimizer),
        optimizer=OptimizerState(name="AdamW", max_norm=_MAX_NORM, groups=by_options(groups)),
    )
    return checked_state(found, where)


def _num_steps(folder: Folder, tensor: DcpTensor) -> int:
    """Return the steps that a parameter took, which torch counts in a tensor of one float."""
    at = read_chunks(folder, {tensor.name: tensor})[tensor.name][0]
    if at.dtype not in _SCALARS or at.nbytes != calcsize(_SCALARS[at.dtype]):
        raise SourceError(str(at.file), f"expected one number as {tensor.name!r}", LEAVE, code=BAD_OPTIMIZER)
    (steps,) = unpack(_SCALARS[at.dtype], read_range(at.file, at.begin, at.end))
    if not (0 <= steps < 1 << 53 and steps == int(steps)):
        raise SourceError(
            str(at.file), f"expected a count as {tensor.name!r}, found {steps}", LEAVE, code=BAD_OPTIMIZER
        )
    return int(steps)


def _rate(optimizer: SavedOptimizer) -> LearningRate | None:
    rates = [options.get("lr") for options in optimizer.groups.values()]
    return constant_rate(rates[0]) if rates and all(rate == rates[0] for rate in rates) else None


def _groups(folder: Folder, saved: DcpMetadata, parameters: Sequence[str]) -> Mapping[str, Mapping[object, object]]:
    """Return each parameter's options: saved for each by name, or as the list that torch's optimizers have."""
    if (whole := saved.values.get(_GROUPS)) is not None:
        return dict(_listed(read_values(folder, [whole])[0]))
    names = {(fqn, option): f"{_GROUPS}.{fqn}.{option}" for fqn in parameters for option in (*_OPTIONS, *ADAMW_FLAGS)}
    there = {key: saved.values[name] for key, name in names.items() if name in saved.values}
    if lacking := [name for key, name in names.items() if key[1] in _OPTIONS and key not in there]:
        problem = f"found no {lacking[0]!r}, the options of the optimizer"
        raise SourceError(f"{folder}/{METADATA_NAME}", problem, LEAVE, code=BAD_OPTIMIZER)
    found: dict[str, dict[object, object]] = {fqn: {} for fqn in parameters}
    for (fqn, option), value in zip(there, read_values(folder, there.values()), strict=True):
        found[fqn][option] = value
    return found


def _listed(groups: Any) -> Iterator[tuple[str, Mapping[object, object]]]:
    for group in groups if isinstance(groups, list) else ():
        fqns = group.get("params") if isinstance(group, dict) else None
        for fqn in fqns if isinstance(fqns, list) else ():
            yield str(fqn), group


def _by_parameter(
    optimizer: SavedOptimizer, fqns_of: FqnsOf, where: str
) -> Iterator[tuple[ParameterGroup, Iterable[str]]]:
    for fqn, tensor in optimizer.moments[MOMENTS[0]].items():
        options, place = optimizer.groups.get(fqn, {}), f"{where}: {fqn!r}"
        check_adamw(options, place)
        yield group_of(options, place), fqns_of(fqn, tensor)


def _numbers(folder: Folder, saved: DcpMetadata, names: Iterable[str]) -> dict[str, int]:
    """Return those of these values that the checkpoint has."""
    there: list[DcpValue] = [saved.values[name] for name in names if name in saved.values]
    found = dict(zip((value.name for value in there), read_values(folder, there), strict=True))
    for name, value in found.items():
        if type(value) is not int or not 0 <= value < 1 << 53:
            problem = f"expected a count, found {str(value)[:80]!r}"
            raise SourceError(f"{folder}/{METADATA_NAME}: {name!r}", problem, LEAVE, code=BAD_OPTIMIZER)
    return {name: value for name, value in found.items() if type(value) is int}
