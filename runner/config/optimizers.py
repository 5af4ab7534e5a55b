"""Parameter groups: what --optimizer asks for, which parameters each group has, and whether a checkpoint's state fits.

No torch: classes are looked up in `runner.training.algorithms`.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from manifests.errors import CheckpointError, UsageError
from manifests.models import ModelShape
from manifests.optimizer_state import (
    EMA,
    GroupNumbers,
    compact_patterns,
    hidden_matrices,
    is_plain,
    kinds_of,
    state_shapes,
)
from manifests.schema import AlgorithmOption, OptimizerState, ParameterGroup
from manifests.store import read_small_file
from runner.config.schema import OptimOptions

ADAMS = ("AdamW", "Adam")  # whose betas and eps have fields of their own
WHOLE = ("Muon", "Adafactor")
ELEMENTWISE = "elementwise"  # an option that is not the class's: its result for a slice is that of the whole
_PRESETS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adafactor": "Adafactor", "muon": "Muon"}
_MOMENTUM = {"SGD": 0.9, "Muon": 0.95}
_MOST_NBYTES = 1 << 20
_ANEW = "train it with the same algorithm and options, or start a new run with --resume-weights-only"
_OF_GROUP = {"algorithm", "patterns", "rate_factor", "weight_decay", "clip"}
_RATE = "--lr is the learning rate of all groups, which rate_factor of a group multiplies"


def algorithm_of(group: ParameterGroup, name: str) -> str:
    return group.algorithm or name


def is_elementwise(group: ParameterGroup, name: str) -> bool:
    """Whether a group's algorithm computes the same for a slice; what a file does not declare needs whole tensors."""
    return bool(options_of(group).get(ELEMENTWISE, algorithm_of(group, name) in (*ADAMS, "SGD")))


def options_of(group: ParameterGroup) -> dict[str, Any]:
    return {option.name: json.loads(option.value) for option in group.options}


def optimizer_of(optim: OptimOptions, shape: ModelShape, stored: OptimizerState | None = None) -> OptimizerState:
    """Return the groups of a run, without kinds: those of --optimizer, else those of the checkpoint that it resumes.

    Raises:
        UsageError: a malformed file, or a pattern that matches no parameter which an earlier one has not.
        CheckpointError: groups of a checkpoint name a class of another package, which only --optimizer may.
    """
    ema = {"max_norm": optim.max_norm, "ema": optim.ema}
    if optim.optimizer is None and stored is not None and not is_flagged_for(stored, shape):
        names = {algorithm_of(group, stored.name) for group in stored.groups}
        if foreign := sorted(name for name in names if "." in name):
            problem = f"was trained with {foreign[0]}; no code is loaded because a checkpoint names it"
            raise CheckpointError("--resume", problem, "pass --optimizer again", code="resume.other-optimizer")
        return replace(stored, kinds=None, **ema)  # type: ignore[arg-type]
    if optim.optimizer is None or optim.optimizer == "adamw":
        return OptimizerState(name="AdamW", groups=_adams(optim, shape), **ema)  # type: ignore[arg-type]
    if optim.optimizer == "adam":
        return OptimizerState(name="Adam", groups=_adams(optim, shape), **ema)  # type: ignore[arg-type]
    if optim.optimizer == "muon":
        hidden = hidden_matrices(shape.by_module(), shape.tensors)
        patterns = compact_patterns(hidden, shape.tensors.keys() - hidden)
        muon = _group(optim, {"algorithm": "Muon", "patterns": patterns}, "--optimizer muon")
        rest, *bare = _adams(optim, shape)
        return OptimizerState(name="AdamW", groups=(muon, *bare, rest), **ema)  # type: ignore[arg-type]
    if optim.optimizer in _PRESETS:
        group = _group(optim, {"algorithm": _PRESETS[optim.optimizer]}, f"--optimizer {optim.optimizer}")
        groups: tuple[ParameterGroup, ...] = (group,)
    elif optim.optimizer.endswith(".toml"):
        groups = tuple(_groups_in(Path(optim.optimizer), optim))
        _check_patterns(groups, shape, optim.optimizer)
    else:
        groups = (_group(optim, {"algorithm": optim.optimizer}, f"--optimizer {optim.optimizer}"),)
    name = groups[-1].algorithm or "AdamW"
    named = (replace(group, algorithm=None if group.algorithm == name else group.algorithm) for group in groups)
    return OptimizerState(name=name, groups=tuple(named), **ema)  # type: ignore[arg-type]


def check_flags(stored: OptimizerState, given: Iterable[str], shape: ModelShape) -> None:
    """Refuse flags of AdamW, Muon or SGD where a resumed run has the groups of its checkpoint."""
    of_groups = {"beta1", "beta2", "eps", "weight_decay", "weight_decay_1d", "momentum"}
    if not is_flagged_for(stored, shape) and (flags := sorted(of_groups.intersection(given))):
        problem = "is an option of the checkpoint's parameter groups, which --optimizer changes"
        hint = "pass --optimizer too, or leave the flag out"
        raise UsageError("--" + flags[0].replace("_", "-"), problem, hint, code="options.optimizer")


def check_flags_are_used(plan: OptimizerState, given: Iterable[str], optimizer: str | None) -> None:
    """Refuse a flag that is an option of no group of a run; `optimizer` is --optimizer."""
    algorithms = {algorithm_of(group, plan.name) for group in plan.groups}
    users = {name: {*ADAMS} for name in ("beta1", "beta2", "eps", "weight_decay_1d")}
    users |= {"weight_decay": {*_PRESETS.values()}, "momentum": {*_MOMENTUM}}
    if optimizer is not None and optimizer.endswith(".toml"):
        users["weight_decay_1d"] = set()  # its groups are as they are written
    for name in sorted(users.keys() & set(given)):
        if not users[name] & algorithms:
            problem = f"is not an option of {', '.join(sorted(algorithms))}"
            hint = "leave it out; options of a class are written in a TOML file: --optimizer groups.toml"
            raise UsageError("--" + name.replace("_", "-"), problem, hint, code="options.optimizer")


def numbers_of(optimizer: OptimizerState, shape: ModelShape) -> GroupNumbers:
    return GroupNumbers(optimizer.groups, shape.ties)


def trained_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters: no buffers."""
    untrained = shape.untrained_suffixes or ("\0",)
    return {fqn: dims for fqn, dims in shape.tensors.items() if not fqn.endswith(untrained)}


def describe_groups(
    optimizer: OptimizerState, shape: ModelShape, trains: Callable[[str], bool] | None = None
) -> Iterator[str]:
    """Yield a line for each group: its algorithm and how many tensors and parameters of those that a run trains."""
    numbers, counts = numbers_of(optimizer, shape), [[0, 0] for _ in optimizer.groups]
    tied = {fqn for group in shape.ties for fqn in group[1:]}
    for fqn, dims in trained_tensors(shape).items():
        if fqn not in tied and (trains is None or trains(fqn)):
            count = counts[numbers.of(fqn)]
            count[0] += 1
            count[1] += math.prod(dims)
    for number, group in enumerate(optimizer.groups):
        shown = ", ".join(group.fqns[:3]) + (", ..." if len(group.fqns) > 3 else "") if group.fqns else "all others"
        details = "" if group.rate_factor is None else f", learning rate x {group.rate_factor:g}"
        details += f", weight decay {group.weight_decay:g}" + (", not clipped" if group.skips_clipping else "")
        yield (
            f"group {number}: {algorithm_of(group, optimizer.name)}{details}, "
            f"{counts[number][0]} tensors, {counts[number][1]:,} parameters: {shown}"
        )


def check_state_fits(optimizer: OptimizerState, stored: OptimizerState, shape: ModelShape, where: str) -> None:
    """Refuse a checkpoint in which another algorithm trained one of the parameters.

    Raises:
        CheckpointError: naming the first of them.
    """
    before, after = numbers_of(stored, shape), numbers_of(optimizer, shape)
    for fqn in trained_tensors(shape):
        old = algorithm_of(stored.groups[before.of(fqn)], stored.name)
        new = algorithm_of(optimizer.groups[after.of(fqn)], optimizer.name)
        if old != new:
            problem = f"{fqn} was trained with {old}, and --optimizer has it in a group of {new}"
            raise CheckpointError(where, problem, _ANEW, code="resume.other-optimizer")
    tensors, present = trained_tensors(shape), {kind.name: kind for kind in kinds_of(stored)}
    for kind in kinds_of(optimizer):
        needed = state_shapes(kind, optimizer.groups, tensors, shape.ties)
        other = present.get(kind.name)
        stored_shapes = state_shapes(other, stored.groups, tensors, shape.ties) if other else {}
        for fqn in needed if kind.name != EMA else ():
            if stored_shapes.get(fqn) != needed[fqn]:
                problem = f"has no {kind.name} of {fqn} of the shape that these options need"
                raise CheckpointError(where, problem, _ANEW, code="resume.other-optimizer")


def is_flagged(stored: OptimizerState) -> bool:
    """Whether the flags of AdamW describe a checkpoint's groups: one, or that and one without weight decay."""
    first, *others = stored.groups
    bare = [replace(first, weight_decay=0.0, fqns=group.fqns) for group in others[:1]]
    return stored.name == "AdamW" and not first.fqns and is_plain(first) and others == bare


def is_flagged_for(stored: OptimizerState, shape: ModelShape) -> bool:
    groups = stored.groups
    return is_flagged(stored) and (len(groups) == 1 or groups[1].fqns == without_decay(groups[0], shape).fqns)


def _adams(optim: OptimOptions, shape: ModelShape) -> tuple[ParameterGroup, ...]:
    """Return the group of all other parameters, and the one of 1-D parameters if they have no weight decay."""
    group = ParameterGroup(beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps, weight_decay=optim.weight_decay)
    return (group,) if optim.weight_decay_1d else (group, without_decay(group, shape))


def without_decay(group: ParameterGroup, shape: ModelShape) -> ParameterGroup:
    """Return the group of the 1-D parameters, if they have no weight decay."""
    lines = (fqn for fqn, dims in shape.tensors.items() if len(dims) == 1 and shape.count_params(fqn))
    return replace(group, weight_decay=0.0, fqns=tuple(sorted(lines)))


def _groups_in(file: Path, optim: OptimOptions) -> Iterator[ParameterGroup]:
    where = f"--optimizer {file}"
    try:
        document = tomllib.loads(read_small_file(file, most_nbytes=_MOST_NBYTES).decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(where, f"is not TOML: {error}", code="options.optimizer-file") from error
    tables = document.get("group")
    is_list = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if not tables or not is_list or document.keys() != {"group"}:
        raise UsageError(where, "expected [[group]] tables and nothing else", code="options.optimizer-file")
    if sum(not table.get("patterns") for table in tables) > 1:
        problem = "expected patterns in all groups but one, which has all other parameters"
        raise UsageError(where, problem, code="options.optimizer-file")
    for number, table in enumerate(tables):
        yield _group(optim, table, f"{where}: group {number}")


def _group(optim: OptimOptions, table: Mapping[str, Any], where: str) -> ParameterGroup:
    """Return a group from its table; what it does not say, and AdamW, SGD or Muon has, are the flags."""
    algorithm = table.get("algorithm")
    algorithm = _PRESETS.get(algorithm, algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(algorithm, str) or not (algorithm in _PRESETS.values() or "." in algorithm):
        presets = ", ".join(_PRESETS)
        problem = f"expected {presets} or a class by its dotted name as the algorithm, found {str(algorithm)[:80]!r}"
        raise UsageError(where, problem, code="options.optimizer-file")
    options = {key: value for key, value in table.items() if key not in _OF_GROUP}
    if "lr" in options:
        raise UsageError(f"{where}: lr", "is not supported", _RATE, code="options.optimizer-file")
    if not isinstance(options.get(ELEMENTWISE, False), bool):
        raise UsageError(f"{where}: {ELEMENTWISE}", "expected true or false", code="options.optimizer-file")
    beta1 = beta2 = eps = 0.0
    if algorithm in ADAMS:
        betas = options.pop("betas", [optim.beta1, optim.beta2])
        if not isinstance(betas, list) or len(betas) != 2:
            raise UsageError(f"{where}: betas", "expected two numbers", code="options.optimizer-file")
        beta1, beta2 = (_number(beta, f"{where}: betas", below=1.0) for beta in betas)
        eps = _number(options.pop("eps", optim.eps), f"{where}: eps")
    if algorithm in _MOMENTUM:
        options.setdefault("momentum", _MOMENTUM[algorithm] if optim.momentum is None else optim.momentum)
    decay = table.get("weight_decay", 0.0 if "." in algorithm else optim.weight_decay)
    patterns, clip, factor = table.get("patterns", ()), table.get("clip", True), table.get("rate_factor")
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError(f"{where}: patterns", "expected a list of strings", code="options.optimizer-file")
    if not isinstance(clip, bool):
        raise UsageError(f"{where}: clip", "expected true or false", code="options.optimizer-file")
    try:
        texts = [AlgorithmOption(name=name, value=json.dumps(options[name])) for name in sorted(options)]
    except TypeError as error:  # a date
        raise UsageError(
            where, f"a checkpoint cannot have this argument: {error}", code="options.optimizer-file"
        ) from error
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


def _number(value: object, where: str, below: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < below:
        limit = "" if below == math.inf else f" and < {below:g}"
        problem = f"expected a number >= 0{limit}, found {str(value)[:80]!r}"
        raise UsageError(where, problem, code="options.optimizer-file")
    return float(value)


def _check_patterns(groups: Sequence[ParameterGroup], shape: ModelShape, where: str) -> None:
    """Refuse a pattern that takes no parameter: one of a mistake, or of earlier patterns that take all it matches."""
    tensors, taken, of_all = trained_tensors(shape), set[str](), GroupNumbers(groups, shape.ties)
    for number, group in enumerate(groups):
        for pattern in group.fqns:
            numbers = GroupNumbers((replace(group, fqns=(pattern,)), replace(group, fqns=())))
            matched = {fqn for fqn in tensors if numbers.of(fqn) == 0}
            # Every name of a tied parameter may be written, in the group that its first name is in.
            if not any(of_all.of(fqn) == number for fqn in matched - taken):
                problem = "matches only what earlier patterns have" if matched & taken else "matches no parameter"
                place = f"--optimizer {where}: group {number}: {pattern!r}"
                hint = "patterns are Hugging Face names with * and ?; the first group that matches has the parameter"
                raise UsageError(place, problem, hint, code="options.optimizer-pattern")
            taken |= matched
