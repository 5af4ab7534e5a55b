"""What optimizer state a checkpoint has: its kinds, their shapes, and the group of each parameter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from math import prod

from manifests.schema import MOMENTS, WEIGHTS, Holds, Manifest, OptimizerState, ParameterGroup, StateKind

EMA = "ema"  # the kind of an exponential moving average of the weights
MOMENT_KINDS = tuple(StateKind(name=name, shape="parameter") for name in MOMENTS)
_PATTERN = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def kinds_of(optimizer: OptimizerState) -> tuple[StateKind, ...]:
    """Return the declared kinds; `exp_avg` and `exp_avg_sq` of every parameter if none are declared."""
    return MOMENT_KINDS if optimizer.kinds is None else optimizer.kinds


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
    """Return the matrices of layers, and stacks of them, that are multiplied by: those of linear modules and experts.

    Not embeddings, heads, convolutions and biases, nor tables such as the decays of a state-space model.
    """
    layers = (fqns for module, fqns in modules.items() if module.rpartition(".")[2].isdecimal())
    # Experts' biases may be stacked; MTP layers have copies of the embedding and the head.
    others = ("bias", ".embed_tokens.weight", ".shared_head.head.weight", ".A_log", ".ape")
    of_layers = (fqn for fqns in layers for fqn in fqns if not fqn.endswith(others))
    return {fqn for fqn in of_layers if len(dims := tensors[fqn]) >= 2 and min(dims[-2:]) > 1}


class GroupNumbers:
    """The number of each FQN's group: of the first with a pattern that matches it, else of the one without patterns.

    If all have patterns, what none matches is in the last. A pattern of one tied FQN matches all that are tied to it.
    """

    def __init__(self, groups: Sequence[ParameterGroup], ties: Iterable[Sequence[str]] = ()) -> None:
        self._tied = {fqn: tuple(tied) for tied in ties for fqn in tied}
        self._rest = next((number for number, group in enumerate(groups) if not group.fqns), len(groups) - 1)
        self._exact: dict[str, int] = {}
        # By the text before the first wildcard: there may be hundreds of them, and tens of thousands of FQNs.
        self._patterns: dict[str, list[tuple[re.Pattern[str], int]]] = {}
        for number, group in enumerate(groups):
            for fqn in group.fqns:
                if wildcard := _PATTERN.search(fqn):
                    prefixed = self._patterns.setdefault(fqn[: wildcard.start()], [])
                    prefixed.append((re.compile(translate(fqn)), number))
                else:
                    self._exact.setdefault(fqn, number)
        self._lengths = {len(prefix) for prefix in self._patterns}

    def of(self, fqn: str) -> int:
        names = self._tied.get(fqn, (fqn,))
        numbers = [
            number
            for name in names
            for length in self._lengths
            for pattern, number in self._patterns.get(name[:length], ())
            if pattern.match(name)
        ]
        numbers += [self._exact[name] for name in names if name in self._exact]
        return min(numbers, default=self._rest)


def compact_patterns(fqns: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return patterns that match these FQNs and none of the others: `*` for numbers wherever that tells them apart.

    A manifest stays small: a pattern of layers or experts, or of a layer's experts, stands for all of them.
    """
    rest, others, patterns = set(fqns), tuple(others), set[str]()
    for num_kept in (0, 1):
        taken = {_numberless(other, num_kept) for other in others}
        numberless = {fqn: _numberless(fqn, num_kept) for fqn in rest}
        safe = {pattern for pattern in set(numberless.values()) if not any(_matches(pattern, other) for other in taken)}
        patterns |= safe
        rest = {fqn for fqn, pattern in numberless.items() if pattern not in safe}
    return tuple(sorted(patterns | rest))


def _matches(pattern: str, fqn: str) -> bool:
    return fqn.startswith(pattern.partition("*")[0]) and fnmatchcase(fqn, pattern)


@lru_cache(maxsize=1 << 18)
def _numberless(fqn: str, num_kept: int) -> str:
    """Return an FQN with `*` for its numbers, but for the first `num_kept`."""
    first = _NUMBER.search(fqn) if num_kept else None
    end = first.end() if first else 0
    return fqn[:end] + _NUMBER.sub("*", fqn[end:])
