"""Classes of torch.optim as DCP folders have them: the options in a state dict, and the state of each parameter.

Source: torch 2.13.0, torch/optim; torchtitan 0.3.0, distributed/flex_shard/dist_muon.py, whose DistMuon has the options
and the state of torch's Muon.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from manifests.optimizer_state import compact_patterns, is_plain, kinds_of
from manifests.schema import (
    MOMENTS,
    AlgorithmOption,
    Holds,
    LearningRate,
    OptimizerState,
    ParameterGroup,
    StateKind,
    StateShape,
)
from reshard.formats.assemble import DECOUPLED, bad_optimizer, constant_rate, group_of

_HOW = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}  # how it is computed
_ADAM = {"betas": (0.0, 0.0), "eps": 0.0, "amsgrad": False, "maximize": False}
_OTHERS = {"maximize", "lr", "initial_lr", "weight_decay", "params", "param_names", "name", DECOUPLED, *_HOW}
SHAPES: Mapping[str, StateShape] = {
    **dict.fromkeys((*MOMENTS, "max_exp_avg_sq", "momentum_buffer"), "parameter"),
    "row_var": "rows", "col_var": "columns", "variance": "vector",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchClass:
    """The arguments of a class with their defaults, but for rates and decay, and the kinds of state of a parameter."""

    arguments: Mapping[str, object]
    states: tuple[Set[str], ...]  # a parameter has one of these
    others: Mapping[str, object]  # in exports: `how` it is computed, as torchtitan has it
    counts_steps: bool = True


_STATES, _AMSGRAD = (frozenset(MOMENTS),), frozenset((*MOMENTS, "max_exp_avg_sq"))
CLASSES: Mapping[str, TorchClass] = {
    "AdamW": TorchClass(arguments=_ADAM, states=_STATES, others={**_HOW, "fused": True, DECOUPLED: True}),
    "Adam": TorchClass(arguments=_ADAM, states=_STATES, others={**_HOW, "fused": True, DECOUPLED: False}),
    "SGD": TorchClass(
        arguments={"momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False},
        states=(frozenset({"momentum_buffer"}),),
        others=_HOW,
        counts_steps=False,
    ),
    "Muon": TorchClass(
        arguments={
            "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5,
            "adjust_lr_fn": None,
        },
        states=(frozenset({"momentum_buffer"}),),
        others=_HOW,
        counts_steps=False,
    ),
    "Adafactor": TorchClass(
        arguments={"beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "maximize": False},
        states=(frozenset({"row_var", "col_var"}), frozenset({"variance"})),
        others=_HOW,
    ),
}  # fmt: skip
_MARKS = {"ns_steps": "Muon", "beta2_decay": "Adafactor", "dampening": "SGD", "betas": "AdamW"}


def read_group(options: Mapping[object, object], where: str) -> ParameterGroup:
    """Return the group of a parameter with these options; its rate factor is the learning rate itself."""
    name = next((name for mark, name in _MARKS.items() if mark in options), None)
    if name is None:
        raise bad_optimizer(where, f"expected the options of {', '.join(CLASSES)}, found {str(dict(options))[:120]}")
    if name == "AdamW" and options.get(DECOUPLED) is False and options.get("weight_decay"):
        name = "Adam"
    arguments = CLASSES[name].arguments
    options = {"maximize": False, **options}
    if lacking := [option for option in ("lr", "weight_decay", *arguments) if option not in options]:
        raise bad_optimizer(where, f"found no {lacking[0]!r} among the options of the optimizer")
    if unknown := [option for option in options if option not in {*arguments, *_OTHERS}]:
        raise bad_optimizer(where, f"expected {name}, found {str(unknown[0])[:80]!r}")
    is_adam = "betas" in arguments
    group = group_of(options if is_adam else {**options, "betas": (0.0, 0.0), "eps": 0.0}, where)
    texts = []
    for option in sorted(arguments.keys() - ({"betas", "eps"} if is_adam else set())):
        value = options[option]
        if option == "momentum" or value != arguments[option]:  # the runner always has the momentum
            try:
                texts.append(AlgorithmOption(name=option, value=json.dumps(value, allow_nan=False)))
            except (TypeError, ValueError, RecursionError) as error:
                raise bad_optimizer(where, f"expected a number as {option!r}, found {str(value)[:80]!r}") from error
    rate = constant_rate([options.get("initial_lr", options["lr"])])
    return replace(group, algorithm=name, options=tuple(texts), rate_factor=rate.peak if rate else None)


def read_adamw(groups: Sequence[Mapping[object, object]], where: str) -> list[ParameterGroup]:
    """Return AdamW's groups of a trainer whose schedules are not those of torch.

    The rate factor of each is its learning rate of the next step; if all of these are 0, its peak, where it has one.
    """
    names = ("lr",) if any(group.get("lr") for group in groups) else ("max_lr", "initial_lr", "lr")
    rates = [constant_rate([next((group[name] for name in names if name in group), None)]) for group in groups]
    return [
        replace(group_of(group, where), algorithm="AdamW", rate_factor=rate.peak if rate else None)
        for group, rate in zip(groups, rates, strict=True)
    ]


def states_of(group: ParameterGroup) -> tuple[Set[str], ...]:
    """Return the kinds of state that a parameter of a group has: one of these sets."""
    is_amsgrad = AlgorithmOption(name="amsgrad", value="true") in group.options
    return (_AMSGRAD,) if is_amsgrad else CLASSES[group.algorithm or ""].states


def algorithm_of(group: ParameterGroup, optimizer: OptimizerState) -> str:
    return (group.algorithm or optimizer.name).removeprefix("torch.optim.")


def write_options(group: ParameterGroup, name: str) -> dict[str, object]:
    """Return a group's options as a state dict has them, but for the rates."""
    options = {option.name: json.loads(option.value) for option in group.options if option.name != "elementwise"}
    options = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    if "betas" in CLASSES[name].arguments:
        options |= {"betas": (group.beta1, group.beta2), "eps": group.eps}
    return {**CLASSES[name].arguments, **CLASSES[name].others, **options, "weight_decay": group.weight_decay}


def first_of(groups: Iterable[ParameterGroup]) -> ParameterGroup:
    """Return the group of all other parameters: AdamW's of the largest weight decay, if there is one."""
    return min(groups, key=_order)


def _order(group: ParameterGroup) -> tuple[bool, float]:
    return group.algorithm != "AdamW", -group.weight_decay


def common_rate(groups: Mapping[str, ParameterGroup], rates: Mapping[str, object], where: str) -> LearningRate | None:
    """Return the rate that all groups follow, each by its factor; None: their schedules differ.

    Both are by parameter; `rates` are of the next step.
    """
    first = first_of(groups.values())
    if first.rate_factor == 0 and any(group.rate_factor for group in groups.values()):
        raise bad_optimizer(where, "expected no learning rate that is a multiple of 0, found the one of a group")
    constant = {name: constant_rate([rates[name]]) for name in groups}
    common = next(constant[name] for name, group in groups.items() if group == first)
    for name, group in groups.items():
        rate, base, first_base = constant[name], group.rate_factor, first.rate_factor
        if common is None or rate is None or base is None or first_base is None:
            return None
        if not math.isclose(rate.peak * first_base, common.peak * base, rel_tol=1e-6):
            return None
    return common


def adamw_of(
    groups: Sequence[Mapping[object, object]], numbers: Mapping[str, int], max_norm: float, where: str
) -> tuple[OptimizerState, LearningRate | None]:
    """Return AdamW and its rate: `numbers` has each parameter's group, see `read_adamw`."""
    read = read_adamw(groups, where)
    by_fqn = {fqn: read[number] for fqn, number in numbers.items()}
    rates = {fqn: groups[number].get("lr") for fqn, number in numbers.items()}
    optimizer = optimizer_of(by_fqn, dict.fromkeys(MOMENTS, by_fqn.keys()), max_norm)
    return optimizer, common_rate(by_fqn, rates, where)


def optimizer_of(
    by_fqn: Mapping[str, ParameterGroup], by_kind: Mapping[Holds, Set[str]], max_norm: float
) -> OptimizerState:
    """Return the groups and kinds of parameters, of which each kind of state is of some."""
    fqns: dict[ParameterGroup, set[str]] = {}
    for fqn, group in by_fqn.items():
        fqns.setdefault(group, set()).add(fqn)
    first, *others = ordered = sorted(fqns, key=_order)
    name, rate = first.algorithm or "", first.rate_factor
    groups = [
        replace(
            group,
            algorithm=None if group.algorithm == name else group.algorithm,
            rate_factor=group.rate_factor / rate if rate and group.rate_factor not in (None, rate) else None,
        )
        for group in ordered
    ]
    if all(map(is_plain, groups)):
        patterns = [tuple(sorted(fqns[group])) for group in others]
    else:
        patterns = [compact_patterns(fqns[group], by_fqn.keys() - fqns[group]) for group in others]
    named = [replace(group, fqns=of) for group, of in zip(groups[1:], patterns, strict=True)]
    optimizer = OptimizerState(name=name, max_norm=max_norm, groups=(groups[0], *named))
    kinds = []
    for kind, shape in SHAPES.items():
        numbers = tuple(n for n, group in enumerate(ordered) if not by_kind.get(kind, set()).isdisjoint(fqns[group]))
        if numbers:
            kinds.append(StateKind(name=kind, shape=shape, groups=() if len(numbers) == len(ordered) else numbers))
    return optimizer if tuple(kinds) == kinds_of(optimizer) else replace(optimizer, kinds=tuple(kinds))
