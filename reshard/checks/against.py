"""One checkpoint against another: names, shapes, dtypes, and bytes where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reshard.checks.compare import Difference, hash_each, other_bytes
from reshard.formatting import count_of, some
from reshard.tensors.comparison import are_of_one_kind, compare, other_kind
from reshard.tensors.finding import Findings
from stores.bundles import TensorAt


def check_against(
    tensors: Mapping[str, TensorAt],
    other: Mapping[str, TensorAt],
    location: str,
    findings: Findings,
    progress: Callable[[int], object],
    *,
    reads_bytes: bool,
) -> None:
    """Report tensors that only one of two checkpoints has, or that differ."""
    comparison = compare(other, tensors, are_of_one_kind)
    for names, problem in ((comparison.missing, "missing here"), (comparison.unexpected, f"not in {location}")):
        if names:
            sentence = f"{count_of(names, 'tensor')} {problem}: {some(names)}"
            hint = "the two are of different models or versions, or one is incomplete"
            findings.add(location, sentence, hint, names, code="check.other-names")
    for name in comparison.different:
        problem = other_kind(other[name], tensors[name])
        findings.add(f"{tensors[name].file}: {name!r}", problem, code="check.other-kind")
    if not reads_bytes:
        return
    differing = {*comparison.unexpected, *comparison.different}
    pairs = [(other[name], tensor) for name, tensor in tensors.items() if name not in differing]
    unreadable: list[Difference] = []
    digests = hash_each([tensor for _, tensor in pairs], progress, unreadable)
    for difference in other_bytes(pairs, digests, progress, unreadable):
        findings.add(difference.where, difference.problem, code="check.other-bytes")
    for difference in unreadable:
        findings.add(difference.where, difference.problem, code="check.unreadable")
