"""Optimizer classes: looked up, constructed, and tested on tiny tensors before they are accepted."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import nn

from manifests.errors import UsageError
from manifests.models import ModelShape
from manifests.optimizer_groups import ADAMS, ELEMENTWISE, algorithm_of, options_of
from manifests.optimizer_state import EMA, GroupNumbers, kinds_of, shape_of
from manifests.schema import Holds, OptimizerState, ParameterGroup, StateKind, StateShape, TrainingState
from manifests.training_state import state_problems
from runner.config.flags import TrainOptions
from runner.config.optimizers import (
    check_flags,
    check_flags_are_used,
    check_state_fits,
    describe_groups,
    is_elementwise,
    is_flagged_for,
    optimizer_of,
)
from runner.config.trained import ties_in_training, trained_by

_TINY: tuple[tuple[int, ...], ...] = ((6,), (2, 6, 4), (6, 4))  # what a class says of the last is shown
_SHAPES: tuple[StateShape, ...] = ("parameter", "vector", "matrix", "rows", "columns", "scalar")
_LIMIT = 1e-6
_NUM_STEPS = 3
_STEP = "step"  # of each parameter: the number of steps
_CODE = "options.optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """A group's class and arguments. `kinds` is the state that it keeps; `num_dims` what parameters may have."""

    name: str
    group: ParameterGroup
    make: Callable[[Sequence[torch.Tensor], float], torch.optim.Optimizer]  # with the group's peak rate
    is_elementwise: bool
    kinds: tuple[StateKind, ...] = ()
    num_dims: frozenset[int] = frozenset()
    first_step: object = None  # the step count before step 1: a tensor or a number; None: it has none

    def scale_rate(self, lr: float) -> float:
        """Return the group's learning rate where that of the run is `lr`."""
        return lr if self.group.rate_factor is None else lr * self.group.rate_factor

    def matrices(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what one call of the class takes of a tensor: of a stack that it does not take, each matrix."""
        return (whole,) if whole.dim() in self.num_dims else tuple(whole.flatten(0, -3).unbind())

    def check_takes(self, fqn: str, shape: tuple[int, ...]) -> None:
        """Raise UsageError if the class takes no parameter of this shape, nor the matrices that it consists of."""
        takes_others = (
            len(self.num_dims) == len(_TINY) if self.is_elementwise else len(shape) > 2 and 2 in self.num_dims
        )
        if len(shape) not in self.num_dims and not takes_others:
            counts = " or ".join(map(str, sorted(self.num_dims)))
            problem = f"expected {counts} dimensions: {self.name} trains no other tensors; found {list(shape)}"
            hint = "put it in another group with --optimizer FILE"
            raise UsageError(f"--optimizer: {fqn}", problem, hint, code="options.optimizer-pattern")
        scalar = next((kind.name for kind in self.kinds if kind.shape == "scalar"), None)
        if scalar and len(shape) not in self.num_dims and prod(shape[:-2]) > 1:
            problem = f"is a stack of matrices, and {self.name} has a {scalar} of each: no checkpoint can have several"
            hint = "put it in another group with --optimizer FILE"
            raise UsageError(f"--optimizer: {fqn}", problem, hint, code="options.optimizer-pattern")


def algorithms_of(optimizer: OptimizerState) -> tuple[Algorithm, ...]:
    """Return the algorithm of each group, tested."""
    return tuple(map(_tested, (_algorithm(group, optimizer.name) for group in optimizer.groups)))


def plan_groups(
    options: TrainOptions, shape: ModelShape, stored: OptimizerState | None, where: str
) -> tuple[TrainOptions, tuple[str, ...]]:
    """Return a run's options with its parameter groups, and a line for each unless they are plain AdamW's.

    `stored` is what a checkpoint says that is resumed, from `where`.
    """
    name = options.optim.optimizer
    if stored is not None and name is None:
        check_flags(stored, options.given, shape)
    trains = None if options.lora else trained_by(options, ties_in_training(shape))
    tensors = {fqn: dims for fqn, dims in shape.trained.items() if trains is None or trains(fqn)}
    trained = replace(shape, tensors=tensors)
    plan = declare_kinds(optimizer_of(options.optim, shape, stored), trained)
    check_flags_are_used(plan, options.given, name)
    if options.lora is not None and (plan.kinds is not None or name not in (None, "adamw", "adam")):
        problem = "adapters are trained by AdamW or Adam, without groups or an average"
        raise UsageError("--lora-rank", problem, "leave --optimizer and --ema out", code="options.lora-combination")
    if stored is not None:
        check_state_fits(plan, stored, trained, where)
    options = replace(options, optim=replace(options.optim, plan=plan))
    is_plain = plan.kinds is None and (options.lora is not None or is_flagged_for(plan, shape))
    lines = () if is_plain else tuple(describe_groups(plan, trained))
    if stored is not None and name is not None and stored.groups != plan.groups:
        lines = (f"--optimizer {name}: options of its groups are others than in the checkpoint", *lines)
    return options, lines


def declare_kinds(plan: OptimizerState, shape: ModelShape) -> OptimizerState:
    """Return a plan with the kinds of state that it leads to for a model: None if they are those of plain AdamW."""
    numbers, algorithms, tensors = GroupNumbers(plan.groups, shape.ties), algorithms_of(plan), shape.trained
    for fqn, dims in tensors.items():
        algorithms[numbers.of(fqn)].check_takes(fqn, dims)
    kinds = state_kinds(algorithms, ((numbers.of(fqn), dims) for fqn, dims in tensors.items()))
    if plan.ema:
        kinds = (*kinds, StateKind(name=EMA, shape="parameter"))
    plan = replace(plan, kinds=None if kinds == kinds_of(replace(plan, kinds=None)) else kinds)
    for place, problem in state_problems(TrainingState(step=0, num_tokens=0, optimizer=plan)):
        where = place.removeprefix("training.optimizer.")
        raise UsageError("--optimizer", f"no checkpoint can have it: {where}: {problem}", code=_CODE)
    return plan


def state_kinds(
    algorithms: Sequence[Algorithm], shapes: Iterable[tuple[int, tuple[int, ...]]]
) -> tuple[StateKind, ...]:
    """Return the kinds of a run's state; `shapes` are those of its parameters, each with the number of its group."""
    present, kinds = set(shapes), dict[Holds, StateKind]()
    for number, algorithm in enumerate(algorithms):
        for kind in algorithm.kinds:
            if not any(shape_of(kind, shape) is not None for of, shape in present if of == number):
                continue
            other = kinds.setdefault(kind.name, replace(kind, groups=()))
            if other.shape != kind.shape:
                problem = f"{kind.name} of {algorithm.name} is a {kind.shape}, and a {other.shape} in another group"
                raise UsageError("--optimizer", problem, "use one of the two algorithms", code=_CODE)
            kinds[kind.name] = replace(other, groups=(*other.groups, number))
    used = {of for of, _ in present}
    return tuple(replace(kind, groups=() if used == {*kind.groups} else kind.groups) for kind in kinds.values())


def _algorithm(group: ParameterGroup, optimizer_name: str) -> Algorithm:
    name = algorithm_of(group, optimizer_name)
    cls = _class_of(name)
    options = {key: value for key, value in options_of(group).items() if key != ELEMENTWISE}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    if name in ADAMS:
        options |= {"betas": (group.beta1, group.beta2), "eps": group.eps}
    if group.weight_decay or "weight_decay" in inspect.signature(cls).parameters:
        options["weight_decay"] = group.weight_decay

    def make(weights: Sequence[torch.Tensor], peak: float) -> torch.optim.Optimizer:
        # On the CPU torch chooses: one weight at a time.
        is_fused = name in ADAMS and "foreach" not in options and all(weight.is_cuda for weight in weights)
        try:
            # Some classes divide by this rate later, and some refuse 0, at which no step changes anything.
            optimizer = cls(list(weights), lr=peak or 1.0, **({"fused": True} if is_fused else {}) | options)
        except Exception as error:
            raise _refusal(name, error) from error
        assert isinstance(optimizer, torch.optim.Optimizer)
        if len(optimizer.param_groups) != 1:
            raise UsageError(f"--optimizer: {name}", "splits its parameters into groups of its own", code=_CODE)
        return optimizer

    return Algorithm(name=name, group=group, make=make, is_elementwise=is_elementwise(group, optimizer_name))


def _class_of(name: str) -> Any:
    """Return a class of torch.optim, or of an installed package by its dotted name, which only --optimizer may have."""
    module, _, leaf = name.rpartition(".")
    try:
        cls = getattr(_import_installed(module or "torch.optim"), leaf)
    except Exception as error:  # whatever the package's own code raises
        hint = "install the package that has it, or check the name for typos"
        raise UsageError(f"--optimizer: {name}", f"there is no such class: {error}", hint, code=_CODE) from error
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UsageError(f"--optimizer: {name}", "expected a torch.optim.Optimizer", code=_CODE)
    return cls


def prepare_state(algorithm: Algorithm, optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> None:
    """Allocate a weight's state, as zeros, so that a checkpoint can be loaded into it."""
    state = optimizer.state[weight]
    for kind in algorithm.kinds:
        if kind.name not in state and (shape := shape_of(kind, tuple(weight.shape))) is not None:
            # In the order of memory of the weight, as torch allocates it.
            state[kind.name] = torch.zeros_like(weight) if shape == weight.shape else weight.new_zeros(shape)
    set_num_steps(algorithm, optimizer, weight, 0)


def set_num_steps(algorithm: Algorithm, optimizer: torch.optim.Optimizer, weight: torch.Tensor, num_steps: int) -> None:
    """Set how many steps a weight has taken, if the class counts them."""
    count = algorithm.first_step
    if isinstance(count, torch.Tensor):
        device = weight.device if optimizer.defaults.get("fused") else count.device
        optimizer.state[weight][_STEP] = torch.full_like(count, num_steps, device=device)
    elif count is not None:
        optimizer.state[weight][_STEP] = num_steps


def num_steps_of(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> int | None:
    """Return how many steps a weight has taken; None if the class does not count them."""
    count = optimizer.state[weight].get(_STEP)
    return None if count is None else int(count)


def _import_installed(module: str) -> ModuleType:
    """Import a module, but not from the working directory, where `python -m` looks first."""
    first = sys.path[0] if sys.path else None
    if first not in ("", os.getcwd()):
        return import_module(module)
    del sys.path[0]
    try:
        return import_module(module)
    finally:
        sys.path.insert(0, first)


def _tested(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with what steps of tiny tensors show of it: its state, and which parameters it takes."""
    states, refusal = dict[tuple[int, ...], dict[str, object]](), None
    for shape in _TINY:
        try:
            states[shape] = _train(algorithm, [_weights(shape)], [_gradients(shape)])[1][0]
        except UsageError as error:
            refusal = error
    if not states:
        assert refusal is not None
        raise refusal
    counts = [value for state in states.values() for key, value in state.items() if key == _STEP]
    tested = replace(
        algorithm,
        kinds=tuple(_kinds_in(algorithm.name, states)),
        num_dims=frozenset(map(len, states)),
        first_step=next((torch.zeros_like(it) if isinstance(it, torch.Tensor) else 0 for it in counts), None),
    )
    for shape, state in states.items():
        _compare_with_whole(tested, shape, state)
    return tested


def _compare_with_whole(algorithm: Algorithm, shape: tuple[int, ...], state: Mapping[str, object]) -> None:
    """Check that steps from state of zeros, and those of slices if that is declared, are those of the whole."""
    where = f"--optimizer: {algorithm.name}"
    whole, gradients = _weights(shape), _gradients(shape)
    expected, _ = _train(algorithm, [whole], [gradients])
    again, (resumed,) = _train(algorithm, [whole], [gradients], starts_at_zero=True)
    if not torch.equal(again[0], expected[0]) or int(_number_of(resumed, _STEP)) != int(_number_of(state, _STEP)):
        problem = "its state does not begin at zero, so that a run could not start or resume with it"
        raise UsageError(where, problem, code=_CODE)
    if not algorithm.is_elementwise:
        return
    hint = f"remove {ELEMENTWISE} from its group"
    if shared := [kind.name for kind in algorithm.kinds if kind.shape in ("rows", "columns")]:
        problem = f"is declared elementwise, and its state {shared[0]!r} is of whole rows or columns"
        raise UsageError(where, problem, hint, code=_CODE)
    for dim in range(whole.dim()):
        of_halves = zip(*(gradient.chunk(2, dim) for gradient in gradients), strict=True)
        halves, _ = _train(algorithm, list(whole.chunk(2, dim)), list(of_halves))
        difference = float((torch.cat(halves, dim) - expected[0]).abs().max())
        if not difference <= _LIMIT:
            problem = (
                f"is declared elementwise, and slices of a tensor train otherwise than the whole: by {difference:.1e}"
            )
            raise UsageError(where, problem, hint, code=_CODE)


def _train(
    algorithm: Algorithm, wholes: Sequence[torch.Tensor], gradients: Sequence[Any], *, starts_at_zero: bool = False
) -> tuple[list[torch.Tensor], list[dict[str, object]]]:
    """Return weights after some steps of a new optimizer, and its state of each of them."""
    weights = [nn.Parameter(whole.clone()) for whole in wholes]
    optimizer = algorithm.make(weights, 0.1)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    before = _settings(optimizer)
    for weight in weights if starts_at_zero else ():
        prepare_state(algorithm, optimizer, weight)
    for of_step in zip(*gradients, strict=True):
        for weight, gradient in zip(weights, of_step, strict=True):
            weight.grad = gradient.clone()
        try:
            optimizer.step()
        except Exception as error:
            raise _refusal(algorithm.name, error) from error
    if _settings(optimizer) != before:
        problem = "keeps state of all parameters together, which no checkpoint has"
        raise UsageError(f"--optimizer: {algorithm.name}", problem, code=_CODE)
    return [weight.detach() for weight in weights], [dict(optimizer.state[weight]) for weight in weights]


def _settings(optimizer: torch.optim.Optimizer) -> str:
    """Return what an optimizer has of its groups or of itself, not of each parameter: a checkpoint has none of it."""
    numbers = {key: value for key, value in vars(optimizer).items() if type(value) in (int, float)}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return repr((numbers, groups))


def _refusal(name: str, error: Exception) -> UsageError:
    shown = " ".join(str(error).split()) or type(error).__name__
    return UsageError(f"--optimizer: {name}", f"its class refused: {shown}", code=_CODE)


def _kinds_in(name: str, states: Mapping[tuple[int, ...], Mapping[str, object]]) -> Iterator[StateKind]:
    """Yield the kinds of state by what an optimizer keeps of parameters of some shapes."""
    for key in sorted({key for state in states.values() for key in state} - {_STEP}):
        values = {whole: state.get(key) for whole, state in states.items()}
        shapes = {w: tuple(value.shape) if isinstance(value, torch.Tensor) else value for w, value in values.items()}
        rules = (StateKind(name=key, shape=rule) for rule in _SHAPES)
        kind = next((rule for rule in rules if all(shape_of(rule, whole) == shapes[whole] for whole in shapes)), None)
        if kind is not None:
            yield kind
        elif any(value is not None for value in shapes.values()):
            shown = next(f"{value} of a parameter {list(w)}" for w, value in shapes.items() if value is not None)
            problem = f"its state {key!r} ({shown}) is none that a checkpoint can have"
            raise UsageError(f"--optimizer: {name}", problem, code=_CODE)


def _number_of(state: Mapping[str, object], key: str) -> float:
    value = state.get(key, 0)
    return float(value) if isinstance(value, (int, float, torch.Tensor)) else -1.0


def _weights(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _gradients(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) for _ in range(_NUM_STEPS)]
