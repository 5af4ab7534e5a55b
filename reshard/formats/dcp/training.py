"""The training state of a DCP checkpoint: how far it was trained, and optimizer state, as torch or torchtitan save it.

Source: torchtitan 0.3.0, torchtitan/trainer.py, components/optimizer; torch 2.13.0, get_optimizer_state_dict and
Optimizer.state_dict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from manifests.errors import SourceError
from manifests.schema import Holds, OptimizerState, ParameterGroup, TrainedDtype, TrainingState
from reshard.archives.dcp import DcpMetadata, DcpTensor, DcpValue, read_chunks, read_values
from reshard.archives.names import METADATA_NAME
from reshard.formats.assemble import (
    BAD_OPTIMIZER,
    OPTIMIZER,
    bad_optimizer,
    checked_state,
    read_number,
    without_optimizer,
)
from reshard.formats.dcp.algorithms import CLASSES, SHAPES, common_rate, optimizer_of, read_group, states_of
from reshard.formatting import some
from stores.base import Folder
from stores.bundles import TensorAt

_STATE, _GROUPS = "optimizer.state.", "optimizer.param_groups"
_NUMBERED = re.compile(rf"{re.escape(_GROUPS)}\.(\d{{1,6}})\.([a-z0-9_]+)")
_STEP = "step"  # of a parameter: how many it took
_BY_NAME = "save get_optimizer_state_dict(model, optimizer), or make the optimizer with model.named_parameters()"
_COUNT, _NUM_TOKENS, _EPOCH = "train_state.step", "train_state.ntokens_seen", "lr_scheduler.last_epoch"
_MAX_NORM = 1.0  # of gradient clipping: torchtitan's default, and no checkpoint has it
_FLOATS: Mapping[str, TrainedDtype] = {"F64": "F64", "F32": "F32", "F16": "F16", "BF16": "BF16"}

FqnsOf = Callable[[str, DcpTensor], Iterable[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedOptimizer:
    """The optimizer state, by kind and by the name that the parameter has in it, and each parameter's group."""

    moments: Mapping[Holds, Mapping[str, DcpTensor]]
    groups: Mapping[str, ParameterGroup]
    rates: Mapping[str, object]  # the learning rate of the next step, by parameter
    num_steps: int | None  # None: the optimizers do not count them
    differing: Mapping[str, int]  # of parameters that took fewer: they had no gradient in the others
    names: Set[str]  # the entries of the checkpoint whose meaning is kept


def find_optimizer(folder: Folder, saved: DcpMetadata, names: Callable[[], Sequence[str]]) -> SavedOptimizer | None:
    """Return the optimizer state that a checkpoint has; None if it has none of any parameter.

    `names` returns the parameters of the model in its order, in which an optimizer numbers them.
    """
    where = f"{folder}/{METADATA_NAME}"
    state = _state(saved, where)
    if not state:
        return None
    groups, entries = _groups(folder, saved)
    entries |= {tensor.name for tensors in state.values() for tensor in tensors.values()}
    options = _options_by_parameter(groups, where)
    if lacking := sorted(state.keys() - options.keys()):
        problem = f"{lacking[0]!r} has optimizer state, and is in no group of parameters"
        raise bad_optimizer(where, problem)
    if all(map(str.isdigit, options)):
        named = _names_of_numbers(groups, options, names, where)
        state = {named[number]: tensors for number, tensors in state.items()}
        options = {named[number]: group for number, group in options.items()}
    read = {parameter: read_group(options[parameter], f"{where}: {parameter!r}") for parameter in state}
    moments: dict[Holds, dict[str, DcpTensor]] = {}
    for parameter, tensors in state.items():
        _check_kinds(parameter, read[parameter], tensors.keys(), where)
        for kind, tensor in tensors.items():
            moments.setdefault(kind, {})[parameter] = tensor
    counts = moments.pop(_STEP, {})
    steps = {parameter: _num_steps(folder, tensor) for parameter, tensor in sorted(counts.items())}
    num_steps = max(steps.values(), default=None)
    return SavedOptimizer(
        moments=moments,
        groups=read,
        rates={parameter: options[parameter]["lr"] for parameter in state},
        num_steps=num_steps,
        differing={parameter: count for parameter, count in steps.items() if count != num_steps},
        names=entries | {_NUM_TOKENS, *_counts_in(saved)},
    )


def _state(saved: DcpMetadata, where: str) -> dict[str, dict[Holds, DcpTensor]]:
    """Return the state of each parameter that has some of a class that is known, by kind."""
    state: dict[str, dict[Holds, DcpTensor]] = {}
    others: dict[str, str] = {}
    entries: list[DcpTensor | DcpValue] = [*saved.tensors, *saved.values.values()]
    for entry in entries:
        parameter, _, kind = entry.name.removeprefix(_STATE).rpartition(".")
        if entry.name.startswith(_STATE):
            if kind in (*SHAPES, _STEP) and isinstance(entry, DcpTensor):
                state.setdefault(parameter, {})[kind] = entry
            else:
                others[parameter] = kind
    state = {parameter: kinds for parameter, kinds in state.items() if kinds.keys() != {_STEP}}
    if more := sorted(state.keys() & others.keys()):
        problem = f"{more[0]!r} has {others[more[0]]!r}, which {', '.join(CLASSES)} do not have"
        raise bad_optimizer(where, problem)
    return state


def _check_kinds(parameter: str, group: ParameterGroup, kinds: Set[str], where: str) -> None:
    """Raise SourceError unless a parameter has all state of its class, and no other."""
    steps = {_STEP} if CLASSES[group.algorithm or ""].counts_steps else set()
    expected = [state | steps for state in states_of(group)]
    if kinds not in expected:
        shown = " or ".join(", ".join(sorted(state)) for state in expected)
        problem = (
            f"expected {shown} of {group.algorithm} as the state of {parameter!r}, found {', '.join(sorted(kinds))}"
        )
        raise bad_optimizer(where, problem)


def training_state(
    folder: Folder, saved: DcpMetadata, optimizer: SavedOptimizer, weights: Mapping[str, TensorAt], fqns_of: FqnsOf
) -> TrainingState:
    """Return how far the checkpoint was trained, and its optimizer's groups and kinds of state.

    The learning rate is that of the next step, and stays: a checkpoint does not have its schedule.
    """
    where, num_steps = f"{folder}/{METADATA_NAME}", optimizer.num_steps
    for name, step in _numbers(folder, saved, _counts_in(saved)).items():
        num_steps = step if num_steps is None else num_steps
        if step != num_steps:
            raise bad_optimizer(where, f"{name} is {step}, and the optimizer took {num_steps} steps")
    if num_steps is None:
        raise bad_optimizer(where, f"found no {_COUNT}, and its optimizer does not count steps")
    counted = _numbers(folder, saved, (_NUM_TOKENS, "dataloader.world_size"))
    tokens, num_replicas = counted.get(_NUM_TOKENS, 0), counted.get("dataloader.world_size", 1)
    items = (item for of_kind in optimizer.moments.values() for item in of_kind.items())
    fqns = {name: [fqn for fqn in fqns_of(name, tensor) if fqn in weights] for name, tensor in items}  # not dropped
    dtypes = {weights[fqn].dtype for names in fqns.values() for fqn in names}
    if not dtypes:
        raise bad_optimizer(where, f"expected the state of parameters that are packed, found that of {some([*fqns])}")
    state = TrainingState(
        step=num_steps,
        num_tokens=tokens * num_replicas,
        dtype=_FLOATS.get(dtypes.pop()) if len(dtypes) == 1 else None,
        learning_rate=common_rate(optimizer.groups, optimizer.rates, where),
        optimizer=_optimizer(optimizer, fqns, where),
    )
    return checked_state(state, where)


def _optimizer(optimizer: SavedOptimizer, fqns: Mapping[str, Sequence[str]], where: str) -> OptimizerState:
    group_by_fqn: dict[str, ParameterGroup] = {}
    for name, names in fqns.items():
        if any(group_by_fqn.setdefault(fqn, optimizer.groups[name]) != optimizer.groups[name] for fqn in names):
            raise bad_optimizer(f"{where}: {name!r}", "it has other options as part of a fused projection")
    kinds = {kind: {fqn for name in tensors for fqn in fqns[name]} for kind, tensors in optimizer.moments.items()}
    return optimizer_of(group_by_fqn, kinds, _MAX_NORM)


def _counts_in(saved: DcpMetadata) -> tuple[str, ...]:
    """Return the entries that count steps. Schedules of other trainers than torchtitan may count epochs, or ranks."""
    is_counted = _COUNT in saved.values or any(tensor.name == _COUNT for tensor in saved.tensors)
    return (_COUNT, _EPOCH) if is_counted else ()


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
    entries: list[DcpTensor | DcpValue]
    if (whole := saved.values.get(_GROUPS)) is not None:
        entries = [whole]
        (listed,) = read_values(folder, [whole])
        groups = [group for group in listed if isinstance(group, dict)] if isinstance(listed, list) else []
    else:
        keyed: dict[str, dict[object, object]] = {}
        entries = [*saved.values.values(), *saved.tensors]
        entries = [entry for entry in entries if entry.name.startswith(f"{_GROUPS}.")]
        if is_numbered := f"{_GROUPS}.0.params" in saved.values:
            entries = [entry for entry in entries if _NUMBERED.fullmatch(entry.name)]
        for name, value in _options_in(folder, entries).items():
            key, _, option = name.removeprefix(f"{_GROUPS}.").rpartition(".")
            keyed.setdefault(key, {} if is_numbered else {"params": [key]})[option] = value
        groups = list(keyed.values())
    return groups, {entry.name for entry in entries}


def _options_in(folder: Folder, entries: Sequence[DcpTensor | DcpValue]) -> dict[str, object]:
    """Return what these entries have; of a tensor its only number, such as a learning rate for `torch.compile`."""
    values = [entry for entry in entries if isinstance(entry, DcpValue)]
    located = read_chunks(folder, {entry.name: entry for entry in entries if isinstance(entry, DcpTensor)})
    whole = {name: chunks[0] for name, chunks in located.items() if len(chunks) == 1}
    numbers = {name: read_number(at, f"{at.file}: {name!r}") for name, at in whole.items()}
    return {**dict(zip((value.name for value in values), read_values(folder, values), strict=True)), **numbers}


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
    """Return the name of each parameter by its number: as groups say, or the model's if one group has them in order."""
    named = [name for group in groups for name in _list(group.get("param_names"))]
    if not named and len(groups) == 1 and list(numbers) == [str(number) for number in range(len(numbers))]:
        named = list(names())
    if len(set(named)) == len(numbers) == len(named) and all(isinstance(name, str) for name in named):
        return dict(zip(numbers, map(str, named), strict=True))
    problem = f"has the state of {len(numbers)} parameters by number, and not which of the model's they are"
    raise SourceError(f"{where}: {OPTIMIZER!r}", problem, f"{_BY_NAME}; {without_optimizer()}", code=BAD_OPTIMIZER)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


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
