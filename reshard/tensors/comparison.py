"""Compare what is expected with what a checkpoint has, by name; and law 1, coverage: exactly the tensors of a model.

Pure; each command asks its own questions of it. Problems are `Findings`, so that one run names all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from manifests.errors import InputError, Parameter, SourceError, UserError
from manifests.models import ModelShape, StoredTensors, module_of
from manifests.models.by_names import BASE
from manifests.models.catalogue import entry_of
from manifests.models.config import CONFIG_NAME
from reshard.formatting import count_of, did_you_mean, some
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


def compare_with_shape(tensors: Mapping[str, TensorAt], shape: ModelShape) -> Comparison:
    """Compare tensors, by FQN, with an architecture: law 1, coverage. One copy of a tie group is enough."""
    tied = {fqn for group in shape.ties if any(name in tensors for name in group) for fqn in group}
    comparison = compare(shape.tensors, tensors, lambda dims, tensor: dims == tensor.shape)
    return replace(
        comparison,
        missing=tuple(fqn for fqn in comparison.missing if fqn not in tied),
        unexpected=tuple(fqn for fqn in comparison.unexpected if not fqn.endswith(shape.ignored_suffixes)),
    )


def are_of_one_kind(expected: TensorAt, actual: TensorAt) -> bool:
    return (expected.dtype, expected.shape) == (actual.dtype, actual.shape)


def other_kind(expected: TensorAt, actual: TensorAt) -> str:
    """Return the problem of a tensor of another dtype or shape than expected."""
    wanted, kind = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (expected, actual))
    return f"expected {wanted} ({expected.file}), found {kind}"


def stored_in(tensors: Mapping[str, TensorAt], where: str) -> StoredTensors:
    """Return the names and shapes of tensors, for an architecture that only they and the catalogue describe."""
    return StoredTensors(tensors={name: tensor.shape for name, tensor in tensors.items()}, where=where)


def without_absent(shape: ModelShape, tensors: Collection[str]) -> ModelShape:
    """Return the shape without optional modules (such as MTP layers) of which no tensor is stored."""
    if not shape.optional:
        return shape
    stored = {module_of(fqn, shape.optional) for fqn in tensors}
    return shape.without(shape.optional.difference(module for module in stored if module))


def trained_part(shape: ModelShape) -> ModelShape:
    """Return the shape of the parameters alone, which is that of each kind of optimizer state."""
    return replace(shape, tensors=shape.trained, ignored_suffixes=())


def check_coverage(
    tensors: Mapping[str, TensorAt], shape: ModelShape, where: str, dropped: frozenset[str] = frozenset()
) -> None:
    """Raise unless the tensors are exactly those of the model, with the shapes of the config."""
    coverage = compare_with_shape(tensors, shape)
    if missing := coverage.missing:
        raise SourceError(
            where,
            f"missing {count_of(missing, 'tensor')} of the model: {some(missing)}",
            f"remove {Parameter('drop')}, which is for tensors that the model does not need"
            if not dropped.isdisjoint(missing)
            else "the checkpoint is incomplete; download it again",
            code="source.missing-tensor",
        )
    if unknown := coverage.unexpected:
        raise SourceError(
            where,
            f"found {count_of(unknown, 'tensor')} that {shape.architecture} does not have: {some(unknown)}",
            _hint_for_unknown(shape.architecture, unknown[0]),
            code="source.unknown-tensor",
        )
    for fqn in coverage.different:
        tensor = tensors[fqn]
        raise SourceError(
            f"{tensor.file}: {fqn!r}.shape",
            f"expected {list(shape.tensors[fqn])} ({CONFIG_NAME}), found {list(tensor.shape)}",
            "download weights and config from one revision",
            code="source.shape-mismatch",
        )


def _hint_for_unknown(architecture: str, fqn: str) -> str:
    """Return what to do about a tensor that the model does not have: not to drop what it has with another config."""
    entry, hint = entry_of(architecture), "download weights and config from one revision"
    return hint if entry is not None and entry.has(fqn) else f"{hint}, or use {Parameter('drop', [fqn])}"


def drop_tensors(
    tensors: MutableMapping[str, TensorAt], drop: frozenset[str], shape: ModelShape | None
) -> tuple[str, ...]:
    """Remove the tensors and modules in `drop`, and return its names in files, which may omit a prefix of FQNs."""
    base, names = shape.base if shape else BASE, list[str]()
    for dropped in sorted(drop):
        matches = _named(dropped, tensors) or _named(dropped.removeprefix(base), tensors)
        if not matches:
            problem = f"the source has no tensor or module {dropped!r}"
            hint = did_you_mean(dropped, sorted({below.rpartition(".")[0] for below in tensors}))
            raise InputError(Parameter("drop"), problem, hint, code="options.unknown-drop")
        for match in matches:
            del tensors[match]
        names += matches
    return tuple(sorted(names))


def _named(name: str, tensors: Collection[str]) -> list[str]:
    """Return a tensor, or those of a module."""
    return [name] if name in tensors else [below for below in tensors if below.startswith(f"{name}.")]


def under_fqns(tensors: MutableMapping[str, TensorAt], shape: ModelShape) -> MutableMapping[str, TensorAt]:
    """Return the tensors under their FQNs; files of the model without its head omit a prefix."""
    if not shape.base:
        return tensors
    by_fqn: dict[str, TensorAt] = {}
    for name, tensor in tensors.items():
        fqn = shape.fqn_of(name)
        if fqn in by_fqn:
            raise SourceError(f"{tensor.file}: {name!r}", f"{fqn} is stored twice", code="source.tensor-twice")
        by_fqn[fqn] = replace(tensor, name=fqn)
    return by_fqn


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is wrong, where, and what to do about it. `code` is stable, see docs/errors.md; `verify` has few."""

    where: str
    problem: str
    code: str
    hint: str
    names: tuple[str, ...]  # the tensors or files that it is about, where there are several


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The readable contents of a checkpoint. Units: bytes of tensors."""

    num_tensors: int = 0
    num_files: int = 0
    nbytes: int = 0
    tensors: Mapping[str, TensorAt] = field(default_factory=dict)  # by stored name, where they can be read
    state: Sequence[TensorAt] = ()  # optimizer state, which may be among them


class Findings:
    """The problems that a run has met so far, each once, in order."""

    def __init__(self) -> None:
        self._findings: dict[Finding, None] = {}

    def add(self, where: object, problem: str, hint: str = "", names: Iterable[str] = (), *, code: str = "") -> None:
        self._findings.setdefault(Finding(where=str(where), problem=problem, code=code, hint=hint, names=tuple(names)))

    def add_error(self, error: UserError) -> None:
        self.add(error.where, error.problem, error.hint, code=error.code)

    def extend(self, others: Iterable[Finding]) -> None:
        self._findings |= dict.fromkeys(others)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._findings)

    def __len__(self) -> int:
        return len(self._findings)
