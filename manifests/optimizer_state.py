"""What optimizer state a checkpoint has: its kinds, their shapes, and the group of each parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase, translate
from math import prod

from manifests.models.shape import ModelShape
from manifests.schema import MOMENTS, WEIGHTS, Holds, Manifest, OptimizerState, ParameterGroup, StateKind, StateShape

PRESETS = ("adamw", "adam", "sgd", "adafactor", "muon")
EMA = "ema"  # the kind of an exponential moving average of the weights
_MOMENTS = tuple(StateKind(name=name, shape="parameter") for name in MOMENTS)
_PATTERN = re.compile(r"[*?\[]")


def kinds_of(optimizer: OptimizerState) -> tuple[StateKind, ...]:
    """Return the declared kinds; `exp_avg` and `exp_avg_sq` of every parameter if none are declared."""
    return _MOMENTS if optimizer.kinds is None else optimizer.kinds


def is_plain(group: ParameterGroup) -> bool:
    """Whether a group has nothing but what version 1 describes: the optimizer's class, AdamW's options, and FQNs."""
    return (group.algorithm, group.rate_factor, group.skips_clipping, group.options) == (None, None, False, ())


def describe_optimizer(optimizer: OptimizerState) -> str:
    """Return the classes of an optimizer's groups, and that there is an average of the weights."""
    names = dict.fromkeys(group.algorithm or optimizer.name for group in optimizer.groups)
    return " and ".join((*names, *(["an average of the weights"] if optimizer.ema else [])))


def stored_kinds(manifest: Manifest) -> tuple[Holds, ...]:
    """Return what a manifest's shards contain: weights first."""
    optimizer = manifest.training.optimizer if manifest.training else None
    return (WEIGHTS, *(kind.name for kind in (kinds_of(optimizer) if optimizer else ())))


def state_shapes(
    kind: StateKind,
    groups: Sequence[ParameterGroup],
    tensors: Mapping[str, tuple[int, ...]],
    ties: Iterable[Sequence[str]] = (),
) -> dict[str, tuple[int, ...]]:
    """Return the shape that a kind of state has of each of these parameters that has it.

    Tied ones, of which `ties` lists the owner first, are one parameter.
    """
    numbers = GroupNumbers(groups, ties)
    shapes = ((fqn, shape_of(kind, shape)) for fqn, shape in tensors.items())
    return {
        fqn: shape for fqn, shape in shapes if shape is not None and (not kind.groups or numbers.of(fqn) in kind.groups)
    }


def shape_of(kind: StateKind, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of a kind of state of a parameter; None if parameters of so many dimensions have none."""
    match kind.shape:
        case "scalar":
            return ()
        case "parameter":
            return shape
        case "vector":
            return shape if len(shape) < 2 else None
        case "matrix":
            return shape if len(shape) >= 2 else None
        case "rows":
            return (*shape[:-1], 1) if len(shape) >= 2 else None
        case "columns":
            return (*shape[:-2], 1, shape[-1]) if len(shape) >= 2 else None


def count_state(
    optimizer: OptimizerState, tensors: Mapping[str, tuple[int, ...]], ties: Iterable[Sequence[str]] = ()
) -> dict[str, float]:
    """Return how many numbers of state there are for each of a tensor's parameters, by FQN."""
    counts = dict.fromkeys(tensors, 0.0)
    for kind in kinds_of(optimizer):
        for fqn, shape in state_shapes(kind, optimizer.groups, tensors, ties).items():
            counts[fqn] += prod(shape) / max(1, prod(tensors[fqn]))
    return counts


def hidden_matrices(modules: Mapping[str, Iterable[str]], tensors: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the matrices of layers, and stacks of them: not those of embeddings and heads, convolutions or biases."""
    layers = (fqns for module, fqns in modules.items() if module.rpartition(".")[2].isdecimal())
    # Experts' biases may be stacked; MTP layers have copies of the embedding and the head.
    others = ("bias", ".embed_tokens.weight", ".shared_head.head.weight")
    of_layers = (fqn for fqns in layers for fqn in fqns if not fqn.endswith(others))
    return {fqn for fqn in of_layers if len(dims := tensors[fqn]) >= 2 and min(dims[-2:]) > 1}


def preset_for(name: str, shape: ModelShape) -> OptimizerState:
    """Return the groups and kinds of a name of --optimizer for a model, without options: what its memory depends on."""
    matrices = hidden_matrices(shape.by_module(), shape.tensors) if name == "muon" else set[str]()
    plain = ParameterGroup(beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0)
    if name == "muon":
        groups = (
            replace(plain, algorithm="Muon", fqns=compact_patterns(matrices, shape.tensors.keys() - matrices)),
            plain,
        )
        kinds = (StateKind(name="momentum_buffer", shape="parameter", groups=(0,)),)
        return OptimizerState(
            name="AdamW",
            max_norm=0.0,
            groups=groups,
            kinds=(*kinds, *(replace(kind, groups=(1,)) for kind in _MOMENTS)),
        )
    shapes: Mapping[str, tuple[tuple[str, StateShape], ...]] = {
        "sgd": (("momentum_buffer", "parameter"),),
        "adafactor": (("col_var", "columns"), ("row_var", "rows"), ("variance", "vector")),
    }
    declared = tuple(StateKind(name=kind, shape=shape) for kind, shape in shapes.get(name, ())) or None
    return OptimizerState(name=name, max_norm=0.0, groups=(plain,), kinds=declared)


def state_counter(name: str, shape: ModelShape) -> Callable[[str], float]:
    """Return a function of FQNs: how many numbers of state --optimizer has for each of a tensor's parameters."""
    is_adam = name in ("adamw", "adam")
    counts = {} if is_adam else count_state(preset_for(name, shape), shape.tensors, shape.ties)
    return lambda fqn: counts.get(fqn, 2.0)


class GroupNumbers:
    """The number of each FQN's group: of the first with a pattern that matches it, else of the one without patterns.

    If all have patterns, what none matches is in the last. A tied FQN is in the group of its owner.
    """

    def __init__(self, groups: Sequence[ParameterGroup], ties: Iterable[Sequence[str]] = ()) -> None:
        self._owners = {fqn: tied[0] for tied in ties for fqn in tied}
        self._rest = next((number for number, group in enumerate(groups) if not group.fqns), len(groups) - 1)
        self._exact: dict[str, int] = {}
        self._patterns: list[tuple[re.Pattern[str], int]] = []
        for number, group in enumerate(groups):
            for fqn in group.fqns:
                if _PATTERN.search(fqn):
                    self._patterns.append((re.compile(translate(fqn)), number))
                else:
                    self._exact.setdefault(fqn, number)

    def of(self, fqn: str) -> int:
        fqn = self._owners.get(fqn, fqn)
        matched = next((number for pattern, number in self._patterns if pattern.match(fqn)), None)
        return min((number for number in (matched, self._exact.get(fqn)) if number is not None), default=self._rest)


def compact_patterns(fqns: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return patterns that match these FQNs and none of the others: `*` for numbers wherever that tells them apart.

    A manifest stays small: a pattern of layers or experts stands for all of them.
    """
    taken = set(map(_numberless, others))
    patterns = {fqn: _numberless(fqn) for fqn in fqns}
    safe = {pattern for pattern in set(patterns.values()) if not any(fnmatchcase(other, pattern) for other in taken)}
    return tuple(sorted({pattern if pattern in safe else fqn for fqn, pattern in patterns.items()}))


def _numberless(fqn: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", fqn)
