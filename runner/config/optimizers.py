"""Parameter groups: what --optimizer asks for, which parameters each group has, and whether a checkpoint's state fits.

No torch: classes are looked up in `runner.training.algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace

from manifests.errors import CheckpointError, UsageError
from manifests.models import ModelShape
from manifests.optimizer_groups import (
    ADAMS,
    ELEMENTWISE,
    LEAST_EPS,
    MOMENTUM,
    PRESETS,
    GroupDefaults,
    algorithm_of,
    groups_of,
    options_of,
    without_decay,
)
from manifests.optimizer_state import EMA, GroupNumbers, is_plain, kinds_of, state_shapes
from manifests.schema import OptimizerState, ParameterGroup
from runner.config.schema import OptimOptions

_ANEW = (
    "train it with the same algorithm and options (without --optimizer, a run has those of the checkpoint), or start a "
    "new run with --resume-weights-only"
)


def is_elementwise(group: ParameterGroup, name: str) -> bool:
    """Whether a group's algorithm computes the same for a slice; what a file does not declare needs whole tensors."""
    return bool(options_of(group).get(ELEMENTWISE, algorithm_of(group, name) in (*ADAMS, "SGD")))


def optimizer_of(optim: OptimOptions, shape: ModelShape, stored: OptimizerState | None = None) -> OptimizerState:
    """Return the groups of a run, without kinds: those of --optimizer, else those of the checkpoint that it resumes."""
    ema = {"max_norm": optim.max_norm, "ema": optim.ema}
    if optim.optimizer is None and stored is not None and not is_flagged_for(stored, shape):
        names = {algorithm_of(group, stored.name) for group in stored.groups}
        if foreign := sorted(name for name in names if "." in name):
            problem = f"was trained with {foreign[0]}; no code is loaded because a checkpoint names it"
            raise CheckpointError("--resume", problem, "pass --optimizer again", code="resume.other-optimizer")
        return replace(stored, kinds=None, **ema)  # type: ignore[arg-type]
    flags = {field.name: getattr(optim, field.name) for field in fields(GroupDefaults)}
    return replace(groups_of(optim.optimizer or "adamw", GroupDefaults(**flags), shape), **ema)  # type: ignore[arg-type]


def check_flags(stored: OptimizerState, given: Iterable[str], shape: ModelShape) -> None:
    """Refuse flags of AdamW, Muon or SGD where a resumed run has the groups of its checkpoint."""
    of_groups = {"beta1", "beta2", "eps", "weight_decay", "weight_decay_1d", "momentum"}
    if not is_flagged_for(stored, shape) and (flags := sorted(of_groups.intersection(given))):
        problem = "is an option of the checkpoint's parameter groups, which --optimizer changes"
        hint = "pass --optimizer too, or leave the flag out"
        raise UsageError("--" + flags[0].replace("_", "-"), problem, hint, code="options.optimizer")


def check_eps(stored: OptimizerState | None, optim: OptimOptions, given: Iterable[str], where: str) -> None:
    """Refuse a checkpoint's `eps` that no run trains with, as other trainers write, unless flags replace it."""
    if stored is None:
        return
    if is_flagged(stored):
        groups, flag = () if "eps" in given else stored.groups[:1], "--eps"
    else:
        groups, flag = () if optim.optimizer is not None else stored.groups, "--optimizer"
    for group in groups:
        if algorithm_of(group, stored.name) in ADAMS and group.eps < LEAST_EPS:
            problem = f"has parameters that were trained with an eps of {group.eps:g}, expected at least {LEAST_EPS}"
            raise CheckpointError(where, problem, f"pass {flag} to train on with another", code="resume.small-eps")


def check_flags_are_used(plan: OptimizerState, given: Iterable[str], optimizer: str | None) -> None:
    """Refuse a flag that is an option of no group of a run; `optimizer` is --optimizer."""
    algorithms = {algorithm_of(group, plan.name) for group in plan.groups}
    users = {name: {*ADAMS} for name in ("beta1", "beta2", "eps", "weight_decay_1d")}
    users |= {"weight_decay": {*PRESETS.values()}, "momentum": {*MOMENTUM}}
    if optimizer is not None and optimizer.endswith(".toml"):
        users["weight_decay_1d"] = set()  # its groups are as they are written
    for name in sorted(users.keys() & set(given)):
        if not users[name] & algorithms:
            problem = f"is not an option of {', '.join(sorted(algorithms))}"
            hint = "leave it out; options of a class are written in a TOML file: --optimizer groups.toml"
            raise UsageError("--" + name.replace("_", "-"), problem, hint, code="options.optimizer")


def numbers_of(optimizer: OptimizerState, shape: ModelShape) -> GroupNumbers:
    return GroupNumbers(optimizer.groups, shape.ties)


def check_copies(optimizer: OptimizerState, shape: ModelShape, ties: Iterable[Sequence[str]]) -> None:
    """Refuse groups that have a weight and a copy apart, such as that of an MTP layer, which no manifest ties.

    A run steps both as one, and readers of its checkpoints look for the state of either in its group.
    """
    numbers = numbers_of(optimizer, shape)
    for owner, *copies in ties:
        for fqn in copies:
            if (number := numbers.of(fqn)) != numbers.of(owner):
                problem = f"is in group {number}, and {owner}, of which it is a copy, in group {numbers.of(owner)}"
                hint = "let the patterns of one group match both"
                raise UsageError(f"--optimizer: {fqn}", problem, hint, code="options.optimizer-pattern")


def describe_groups(optimizer: OptimizerState, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each group: its algorithm and how many tensors and parameters; `shape` has what a run trains."""
    numbers, counts = numbers_of(optimizer, shape), [[0, 0] for _ in optimizer.groups]
    tied = {fqn for group in shape.ties for fqn in group[1:]}
    for fqn, dims in shape.trained.items():
        if fqn not in tied:
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
    """Refuse a checkpoint in which another algorithm trained one of the parameters of `shape`, which a run trains."""
    before, after, tensors = numbers_of(stored, shape), numbers_of(optimizer, shape), shape.trained
    for fqn in tensors:
        old = algorithm_of(stored.groups[before.of(fqn)], stored.name)
        new = algorithm_of(optimizer.groups[after.of(fqn)], optimizer.name)
        if old != new:
            problem = f"{fqn} was trained with {old}, and --optimizer has it in a group of {new}"
            raise CheckpointError(where, problem, _ANEW, code="resume.other-optimizer")
    present = {kind.name: kind for kind in kinds_of(stored)}
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
