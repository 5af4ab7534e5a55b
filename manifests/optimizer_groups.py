"""Parameter groups: what `--optimizer` and its TOML files ask for, and the state that algorithms of torch keep."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manifests.errors import UsageError
from manifests.models.shape import ModelShape
from manifests.optimizer_state import MOMENT_KINDS, GroupNumbers, compact_patterns, count_state, hidden_matrices
from manifests.schema import AlgorithmOption, OptimizerState, ParameterGroup, StateKind
from manifests.store import read_small_file

ADAMS = ("AdamW", "Adam")  # whose betas and eps have fields of their own
LEAST_EPS = 1e-30  # of these: well above the smallest float32, or weights without gradient change by 0/0
ELEMENTWISE = "elementwise"  # an option that is not the class's: its result for a slice is that of the whole
PRESETS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adafactor": "Adafactor", "muon": "Muon"}
MOMENTUM = {"SGD": 0.9, "Muon": 0.95}
_BUFFER = (StateKind(name="momentum_buffer", shape="parameter"),)
_STATES: Mapping[str, tuple[StateKind, ...]] = {
    "AdamW": MOMENT_KINDS, "Adam": MOMENT_KINDS, "SGD": _BUFFER, "Muon": _BUFFER,
    "Adafactor": (
        StateKind(name="col_var", shape="columns"), StateKind(name="row_var", shape="rows"),
        StateKind(name="variance", shape="vector"),
    ),
}  # fmt: skip
_MOST_NBYTES = 1 << 20
_OF_GROUP = {"algorithm", "patterns", "rate_factor", "weight_decay", "clip"}
_RATE = "--lr is the learning rate of all groups, which rate_factor of a group multiplies"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDefaults:
    """Flags of training: a group's options that it does not say itself. State depends on the momentum alone."""

    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    weight_decay_1d: bool = True
    momentum: float | None = None


def groups_of(optimizer: str, defaults: GroupDefaults, shape: ModelShape) -> OptimizerState:
    """Return the groups of --optimizer, without clipping, an average and kinds of state."""
    if optimizer in ("adamw", "adam"):
        return OptimizerState(name=PRESETS[optimizer], max_norm=0.0, groups=_adams(defaults, shape))
    if optimizer == "muon":
        hidden = hidden_matrices(shape.by_module(), shape.tensors)
        patterns = compact_patterns(hidden, shape.tensors.keys() - hidden)
        muon = _group(defaults, {"algorithm": "Muon", "patterns": patterns}, "--optimizer muon")
        rest, *bare = _adams(defaults, shape)
        return OptimizerState(name="AdamW", max_norm=0.0, groups=(muon, *bare, rest))
    if optimizer.endswith(".toml"):
        groups = tuple(_groups_in(Path(optimizer), defaults))
        _check_patterns(groups, shape, optimizer)
    else:
        algorithm = PRESETS.get(optimizer, optimizer)
        groups = (_group(defaults, {"algorithm": algorithm}, f"--optimizer {optimizer}"),)
    name = groups[-1].algorithm or "AdamW"
    named = (replace(group, algorithm=None if group.algorithm == name else group.algorithm) for group in groups)
    return OptimizerState(name=name, max_norm=0.0, groups=tuple(named))


def known_kinds(optimizer: OptimizerState) -> tuple[StateKind, ...]:
    """Return the kinds of state that classes of torch keep with these options, without importing them."""
    kinds: dict[str, StateKind] = {}
    for number, group in enumerate(optimizer.groups):
        name, options = algorithm_of(group, optimizer.name).removeprefix("torch.optim."), options_of(group)
        if name not in _STATES:
            problem, hint = "the state of this class is known when it runs", f"plan with one of {', '.join(PRESETS)}"
            raise UsageError(f"--optimizer: {name}", problem, hint, code="options.optimizer")
        states = () if name == "SGD" and not options.get("momentum") else _STATES[name]
        if options.get("amsgrad"):
            states = (*states, StateKind(name="max_exp_avg_sq", shape="parameter"))
        for kind in states:
            kinds[kind.name] = replace(kind, groups=(*kinds.get(kind.name, kind).groups, number))
    every = tuple(range(len(optimizer.groups)))
    return tuple(replace(kind, groups=() if kind.groups == every else kind.groups) for kind in kinds.values())


def state_counter(optimizer: str, shape: ModelShape) -> Callable[[str], float]:
    """Return a function of FQNs: how many numbers of state --optimizer has for each of a tensor's parameters."""
    plan = groups_of(optimizer, GroupDefaults(), shape)
    plan = replace(plan, kinds=known_kinds(plan))
    counts = {} if plan.kinds == MOMENT_KINDS else count_state(plan, shape.tensors, shape.ties)
    return lambda fqn: counts.get(fqn, 2.0)


def algorithm_of(group: ParameterGroup, name: str) -> str:
    return group.algorithm or name


def options_of(group: ParameterGroup) -> dict[str, Any]:
    return {option.name: json.loads(option.value) for option in group.options}


def without_decay(group: ParameterGroup, shape: ModelShape) -> ParameterGroup:
    """Return the group of the 1-D parameters, if they have no weight decay."""
    lines = (fqn for fqn, dims in shape.tensors.items() if len(dims) == 1 and shape.count_params(fqn))
    return replace(group, weight_decay=0.0, fqns=tuple(sorted(lines)))


def _adams(defaults: GroupDefaults, shape: ModelShape) -> tuple[ParameterGroup, ...]:
    """Return the group of all other parameters, and the one of 1-D parameters if they have no weight decay."""
    group = ParameterGroup(
        beta1=defaults.beta1, beta2=defaults.beta2, eps=defaults.eps, weight_decay=defaults.weight_decay
    )
    bare = without_decay(group, shape)
    return (group,) if defaults.weight_decay_1d or not bare.fqns else (group, bare)


def _groups_in(file: Path, defaults: GroupDefaults) -> Iterator[ParameterGroup]:
    where = f"--optimizer {file}"
    try:
        document = tomllib.loads(read_small_file(file, most_nbytes=_MOST_NBYTES).decode())
    except (ValueError, RecursionError) as error:
        raise _invalid(where, f"is not TOML: {error}") from error
    tables = document.get("group")
    is_list = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if not tables or not is_list or document.keys() != {"group"}:
        raise _invalid(where, "expected [[group]] tables and nothing else")
    if sum(not table.get("patterns") for table in tables) > 1:
        raise _invalid(where, "expected patterns in all groups but one, which has all other parameters")
    for number, table in enumerate(tables):
        yield _group(defaults, table, f"{where}: group {number}")


def _group(defaults: GroupDefaults, table: Mapping[str, Any], where: str) -> ParameterGroup:
    """Return a group from its table; what it does not say, and AdamW, SGD or Muon has, are the flags."""
    algorithm = table.get("algorithm")
    algorithm = PRESETS.get(algorithm, algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(algorithm, str) or not (algorithm in PRESETS.values() or "." in algorithm):
        presets = ", ".join(PRESETS)
        problem = f"expected {presets} or a class by its dotted name as the algorithm, found {str(algorithm)[:80]!r}"
        raise _invalid(where, problem)
    options = {key: value for key, value in table.items() if key not in _OF_GROUP}
    if "lr" in options:
        raise _invalid(f"{where}: lr", "is not supported", _RATE)
    if not isinstance(options.get(ELEMENTWISE, False), bool):
        raise _invalid(f"{where}: {ELEMENTWISE}", "expected true or false")
    beta1 = beta2 = eps = 0.0
    if algorithm in ADAMS:
        betas = options.pop("betas", [defaults.beta1, defaults.beta2])
        if not isinstance(betas, list) or len(betas) != 2:
            raise _invalid(f"{where}: betas", "expected two numbers")
        beta1, beta2 = (_number(beta, f"{where}: betas", below=1.0) for beta in betas)
        eps = _number(options.pop("eps"), f"{where}: eps", LEAST_EPS) if "eps" in options else defaults.eps
    if algorithm in MOMENTUM:
        options.setdefault("momentum", MOMENTUM[algorithm] if defaults.momentum is None else defaults.momentum)
    decay = table.get("weight_decay", 0.0 if "." in algorithm else defaults.weight_decay)
    patterns, clip, factor = table.get("patterns", ()), table.get("clip", True), table.get("rate_factor")
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise _invalid(f"{where}: patterns", "expected a list of strings")
    if not isinstance(clip, bool):
        raise _invalid(f"{where}: clip", "expected true or false")
    try:
        texts = [AlgorithmOption(name=name, value=json.dumps(options[name])) for name in sorted(options)]
    except TypeError as error:  # a date
        raise _invalid(where, f"a checkpoint cannot have this argument: {error}") from error
    return ParameterGroup(
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=_number(decay, f"{where}: weight_decay"),
        fqns=tuple(patterns),
        algorithm=algorithm,
        rate_factor=None if factor is None else _number(factor, f"{where}: rate_factor"),
        skips_clipping=not clip,
        options=tuple(texts),
    )


def _number(value: object, where: str, least: float = 0, below: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < below:
        limit = "" if below == math.inf else f" and < {below:g}"
        raise _invalid(where, f"expected a number >= {least:g}{limit}, found {str(value)[:80]!r}")
    return float(value)


def _invalid(where: str, problem: str, hint: str = "") -> UsageError:
    return UsageError(where, problem, hint, code="options.optimizer-file")


def _check_patterns(groups: Sequence[ParameterGroup], shape: ModelShape, where: str) -> None:
    """Refuse a pattern that takes no parameter: one of a mistake, or of earlier patterns that take all it matches."""
    tensors, taken, of_all = shape.trained, set[str](), GroupNumbers(groups, shape.ties)
    for number, group in enumerate(groups):
        for pattern in group.fqns:
            numbers = GroupNumbers((replace(group, fqns=(pattern,)), replace(group, fqns=())))
            matched = {fqn for fqn in tensors if numbers.of(fqn) == 0}
            if not any(of_all.of(fqn) == number for fqn in matched - taken):
                problem = "matches only what earlier patterns have" if matched & taken else "matches no parameter"
                place = f"--optimizer {where}: group {number}: {pattern!r}"
                hint = "patterns are Hugging Face names with * and ?; the first group that matches has the parameter"
                raise UsageError(place, problem, hint, code="options.optimizer-pattern")
            taken |= matched
