"""The training state of a DCP checkpoint: how far it was trained, and AdamW's state, as torch or torchtitan save them.

Source: torchtitan 0.3.0, torchtitan/trainer.py, components/optimizer; torch 2.13.0, get_optimizer_state_dict and
Optimizer.state_dict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from manifests.errors import SourceError
from manifests.schema import (
    MOMENTS,
    Holds,
    OptimizerState,
    ParameterGroup,
    TrainedDtype,
    TrainingState,
)
from reshard.archives.dcp import DcpMetadata, DcpTensor, DcpValue, read_chunks, read_values
from reshard.archives.names import METADATA_NAME
from reshard.formats.assemble import (
    BAD_OPTIMIZER,
    OPTIMIZER,
    bad_optimizer,
    by_options,
    check_adamw,
    checked_state,
    constant_rate,
    group_of,
    read_number,
    without_optimizer,
)
from stores.base import Folder

_STATE, _GROUPS = "optimizer.state.", "optimizer.param_groups"
_NUMBERED = re.compile(rf"{re.escape(_GROUPS)}\.(\d{{1,6}})\.([a-z_]+)")
_OPTIONS = ("betas", "eps", "weight_decay", "lr", "amsgrad")  # which torch's AdamW always has
_BY_NAME = "save get_optimizer_state_dict(model, optimizer), or make the optimizer with model.named_parameters()"
_COUNTS = ("train_state.step", "train_state.ntokens_seen", "lr_scheduler.last_epoch")
_MAX_NORM = 1.0  # of gradient clipping: torchtitan's default, and no checkpoint has it
_FLOATS: Mapping[str, TrainedDtype] = {"F64": "F64", "F32": "F32", "F16": "F16", "BF16": "BF16"}

FqnsOf = Callable[[str, DcpTensor], Iterable[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedOptimizer:
    """The optimizer state, by kind and by the name that the parameter has in it, and each parameter's options."""

    moments: Mapping[Holds, Mapping[str, DcpTensor]]
    groups: Mapping[str, Mapping[object, object]]  # the options of AdamW, by parameter
    num_steps: int
    names: Set[str]  # the entries of the checkpoint whose meaning is kept


def find_optimizer(folder: Folder, saved: DcpMetadata, names: Callable[[], Sequence[str]]) -> SavedOptimizer | None:
    """Return the AdamW state that a checkpoint has; None if it has none of any parameter.

    `names` returns the parameters of the model in its order, in which an optimizer numbers them.

    Raises:
        SourceError: a parameter has one kind of it and not the others, or other kinds, parameters took different
            numbers of steps or are numbered in an order that is not known, or options are missing or malformed.
    """
    where = f"{folder}/{METADATA_NAME}"
    state = _state(saved, where)
    if not state[MOMENTS[0]]:
        return None
    groups, entries = _groups(folder, saved)
    entries |= {tensor.name for tensors in state.values() for tensor in tensors.values()}
    options = _options_by_parameter(groups, where)
    if lacking := sorted(state["step"].keys() - options.keys()):
        problem = f"{lacking[0]!r} has optimizer state, and is in no group of parameters"
        raise bad_optimizer(where, problem)
    if all(map(str.isdigit, options)):
        named = _names_of_numbers(groups, options, names, where)
        state = {kind: {named[number]: tensors[number] for number in tensors} for kind, tensors in state.items()}
        options = {named[number]: group for number, group in options.items()}
    steps = {parameter: _num_steps(folder, tensor) for parameter, tensor in sorted(state["step"].items())}
    if len(set(steps.values())) > 1:
        few, many = min(steps, key=lambda fqn: steps[fqn]), max(steps, key=lambda fqn: steps[fqn])
        problem = f"{few!r} took {steps[few]} optimizer steps, {many!r} took {steps[many]}"
        raise bad_optimizer(where, problem)
    return SavedOptimizer(
        moments={holds: state[holds] for holds in MOMENTS},
        groups=options,
        num_steps=steps.popitem()[1],
        names=entries | set(_COUNTS),
    )


def _state(saved: DcpMetadata, where: str) -> dict[str, dict[str, DcpTensor]]:
    """Return AdamW's state by kind, all of it for each parameter that has exp_avg or exp_avg_sq."""
    state: dict[str, dict[str, DcpTensor]] = {holds: {} for holds in (*MOMENTS, "step")}
    others: dict[str, str] = {}
    entries: list[DcpTensor | DcpValue] = [*saved.tensors, *saved.values.values()]
    for entry in entries:
        parameter, _, kind = entry.name.removeprefix(_STATE).rpartition(".")
        if entry.name.startswith(_STATE):
            if kind in state and isinstance(entry, DcpTensor):
                state[kind][parameter] = entry
            else:
                others[parameter] = kind
    parameters = state[MOMENTS[0]].keys() | state[MOMENTS[1]].keys()
    for kind, tensors in state.items():
        if lacking := sorted(parameters - tensors.keys()):
            problem = f"{lacking[0]!r} has optimizer state, but no {kind}; {len(lacking)} parameters lack it"
            raise bad_optimizer(where, problem)
    if more := sorted(parameters & others.keys()):
        problem = f"{more[0]!r} has {others[more[0]]!r}, too, which AdamW does not have"
        raise bad_optimizer(where, problem)
    return {kind: {name: tensors[name] for name in tensors if name in parameters} for kind, tensors in state.items()}


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
            raise bad_optimizer(f"{folder}/{METADATA_NAME}", problem)
    counted = _numbers(folder, saved, ("train_state.ntokens_seen", "dataloader.world_size"))
    tokens, num_replicas = counted.get("train_state.ntokens_seen", 0), counted.get("dataloader.world_size", 1)
    kinds = set(dtypes)
    where = f"{folder}/{METADATA_NAME}"
    groups = _by_parameter(optimizer, fqns_of, where)
    state = TrainingState(
        step=optimizer.num_steps,
        num_tokens=tokens * num_replicas,
        dtype=_FLOATS.get(kinds.pop()) if len(kinds) == 1 else None,
        learning_rate=constant_rate([options.get("lr") for options in optimizer.groups.values()]),
        optimizer=OptimizerState(name="AdamW", max_norm=_MAX_NORM, groups=by_options(groups)),
    )
    return checked_state(state, where)


def _num_steps(folder: Folder, tensor: DcpTensor) -> int:
    """Return a count in a tensor of one number: torch has the steps of a parameter so, and torchtitan had its own."""
    at = read_chunks(folder, {tensor.name: tensor})[tensor.name][0]
    where = f"{at.file}: {tensor.name!r}"
    steps = read_number(at, where)
    if not (0 <= steps < 1 << 53 and steps == int(steps)):
        raise bad_optimizer(where, f"expected a count, found {steps}")
    return int(steps)


def _groups(folder: Folder, saved: DcpMetadata) -> tuple[list[Mapping[object, object]], set[str]]:
    """Return the groups, each with its `params`, and the entries that they were read from.

    They are saved as one list, or each option by the number of the group, or by the name of each parameter.
    """
    groups: list[Mapping[object, object]]
    if (whole := saved.values.get(_GROUPS)) is not None:
        entries = [whole]
        (listed,) = read_values(folder, entries)
        groups = [group for group in listed if isinstance(group, dict)] if isinstance(listed, list) else []
    else:
        keyed: dict[str, dict[object, object]] = {}
        options = {name: value for name, value in saved.values.items() if name.startswith(f"{_GROUPS}.")}
        is_numbered = f"{_GROUPS}.0.params" in options
        entries = [value for name, value in options.items() if not is_numbered or _NUMBERED.fullmatch(name)]
        for entry, value in zip(entries, read_values(folder, entries), strict=True):
            key, _, option = entry.name.removeprefix(f"{_GROUPS}.").rpartition(".")
            keyed.setdefault(key, {} if is_numbered else {"params": [key]})[option] = value
        groups = list(keyed.values())
    return groups, {entry.name for entry in entries}


def _options_by_parameter(groups: Iterable[Mapping[object, object]], where: str) -> dict[str, Mapping[object, object]]:
    """Return the group of each parameter, whose name is a number in an optimizer's own state dict."""
    options: dict[str, Mapping[object, object]] = {}
    for group in groups:
        for parameter in map(str, _list(group.get("params"))):
            if parameter in options:
                problem = f"{parameter[:80]!r} is in two groups of parameters"
                raise bad_optimizer(where, problem)
            options[parameter] = group
    return options


def _names_of_numbers(
    groups: Sequence[Mapping[object, object]], numbers: Collection[str], names: Callable[[], Sequence[str]], where: str
) -> dict[str, str]:
    """Return the name of each parameter by its number: as groups say, or the model's if one group has them in order.

    Raises:
        SourceError: the order of the parameters is not known.
    """
    named = [name for group in groups for name in _list(group.get("param_names"))]
    if not named and len(groups) == 1 and list(numbers) == [str(number) for number in range(len(numbers))]:
        named = list(names())
    if len(set(named)) == len(numbers) == len(named) and all(isinstance(name, str) for name in named):
        return dict(zip(numbers, map(str, named), strict=True))
    problem = f"has the state of {len(numbers)} parameters by number, and not which of the model's they are"
    raise SourceError(f"{where}: {OPTIMIZER!r}", problem, f"{_BY_NAME}; {without_optimizer()}", code=BAD_OPTIMIZER)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _by_parameter(
    optimizer: SavedOptimizer, fqns_of: FqnsOf, where: str
) -> Iterator[tuple[ParameterGroup, Iterable[str]]]:
    group_by_fqn: dict[str, ParameterGroup] = {}
    for fqn, tensor in optimizer.moments[MOMENTS[0]].items():
        options, place = optimizer.groups[fqn], f"{where}: {fqn!r}"
        if lacking := [option for option in _OPTIONS if option not in options]:
            problem = f"found no {lacking[0]!r} among the options of the optimizer"
            raise bad_optimizer(place, problem)
        check_adamw(options, place)
        group, fqns = group_of(options, place), tuple(fqns_of(fqn, tensor))
        if any(group_by_fqn.setdefault(name, group) != group for name in fqns):
            raise bad_optimizer(place, "it has other options as part of a fused projection")
        yield group, fqns


def _numbers(folder: Folder, saved: DcpMetadata, names: Collection[str]) -> dict[str, int]:
    """Return those of these values that the checkpoint has."""
    there: list[DcpValue] = [saved.values[name] for name in names if name in saved.values]
    counts = dict(zip((value.name for value in there), read_values(folder, there), strict=True))
    counts |= {tensor.name: _num_steps(folder, tensor) for tensor in saved.tensors if tensor.name in names}
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value < 1 << 53:
            problem = f"expected a count, found {str(value)[:80]!r}"
            raise bad_optimizer(f"{folder}/{METADATA_NAME}: {name!r}", problem)
    return {name: value for name, value in counts.items() if type(value) is int}
