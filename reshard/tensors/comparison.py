"""Compare what is expected with what a checkpoint has, by name. Pure; each verb asks its own questions of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from manifests.models import ModelShape
from stores.bundles import TensorAt

_Expected = TypeVar("_Expected")
_Actual = TypeVar("_Actual")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Names that are only expected, that are only actual, and whose values differ, each in the order of its input."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: tuple[str, ...]


def compare(
    expected: Mapping[str, _Expected],
    actual: Mapping[str, _Actual],
    is_equal: Callable[[_Expected, _Actual], Any] = lambda expected, actual: expected == actual,
) -> Comparison:
    return Comparison(
        missing=tuple(name for name in expected if name not in actual),
        unexpected=tuple(name for name in actual if name not in expected),
        different=tuple(
            name for name, value in actual.items() if name in expected and not is_equal(expected[name], value)
        ),
    )


def compare_emptying(expected: dict[str, _Expected], actual: Iterable[tuple[str, _Actual]]) -> Comparison:
    """Compare as `compare`, in the memory of `expected` alone: what is as expected is removed from it."""
    unexpected, different = [], []
    for name, value in actual:
        if name not in expected:
            unexpected.append(name)
        elif expected.pop(name) != value:
            different.append(name)
    return Comparison(missing=tuple(expected), unexpected=tuple(unexpected), different=tuple(different))


def compare_with_shape(tensors: Mapping[str, TensorAt], shape: ModelShape) -> Comparison:
    """Compare tensors, by FQN, with an architecture: law 1, coverage. One copy of a tie group is enough."""
    tied = {fqn for group in shape.ties if any(name in tensors for name in group) for fqn in group}
    ignored = shape.ignored_suffixes or ("\0",)
    comparison = compare(shape.tensors, tensors, lambda dims, tensor: dims == tensor.shape)
    return replace(
        comparison,
        missing=tuple(fqn for fqn in comparison.missing if fqn not in tied),
        unexpected=tuple(fqn for fqn in comparison.unexpected if not fqn.endswith(ignored)),
    )


def are_of_one_kind(expected: TensorAt, actual: TensorAt) -> bool:
    return (expected.dtype, expected.shape) == (actual.dtype, actual.shape)


def other_kind(expected: TensorAt, actual: TensorAt) -> str:
    """Return the problem of a tensor of another dtype or shape than expected."""
    wanted, kind = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (expected, actual))
    return f"expected {wanted} ({expected.file}), found {kind}"
