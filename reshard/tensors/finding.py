"""Problems of a checkpoint: collected, not raised, so that one run names all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from manifests.errors import UserError
from stores.bundles import TensorAt


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is wrong, where, and what to do about it. `code` is stable, see docs/errors.md; `verify` has few."""

    where: str
    problem: str
    code: str = ""
    hint: str = ""
    names: tuple[str, ...] = ()  # the tensors or files that it is about, where there are several


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The readable contents of a checkpoint. Units: bytes of tensors."""

    num_tensors: int = 0
    num_files: int = 0
    nbytes: int = 0
    tensors: Mapping[str, TensorAt] = field(default_factory=dict)  # by stored name, where they can be read


class Findings:
    """The problems that a run has met so far, each once, in order."""

    def __init__(self) -> None:
        self._findings: dict[Finding, None] = {}

    def add(self, where: object, problem: str, hint: str = "", names: Iterable[str] = (), *, code: str = "") -> None:
        self._findings.setdefault(Finding(where=str(where), problem=problem, code=code, hint=hint, names=tuple(names)))

    def add_error(self, error: UserError) -> None:
        """Add an error that a reader raised."""
        self.add(error.where, error.problem, error.hint, code=error.code)

    def extend(self, others: Iterable[Finding]) -> None:
        self._findings |= dict.fromkeys(others)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._findings)

    def __len__(self) -> int:
        return len(self._findings)
