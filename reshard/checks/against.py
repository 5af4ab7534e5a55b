"""One checkpoint against another: names, shapes, dtypes, and bytes where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from manifests.digest import PREFIX
from reshard.checks.finding import Findings, count_of, some
from reshard.operations.compare import Difference, hash_each
from stores.bundles import TensorAt


def check_against(
    tensors: Mapping[str, TensorAt],
    other: Mapping[str, TensorAt],
    location: str,
    findings: Findings,
    progress: Callable[[int], object],
    *,
    reads_bytes: bool,
) -> int:
    """Report tensors that only one of two checkpoints has, or that differ; return the bytes that were read."""
    for names, problem in (
        ([name for name in other if name not in tensors], "missing here"),
        ([name for name in tensors if name not in other], f"not in {location}"),
    ):
        if names:
            sentence = f"{count_of(names, 'tensor')} {problem}: {some(names)}"
            hint = "the two are of different models or versions, or one is incomplete"
            findings.add(location, sentence, hint, names, code="check.other-names")
    alike = []
    for name, tensor in tensors.items():
        expected = other.get(name)
        if expected is None:
            continue
        if (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape):
            alike.append((tensor, expected))
            continue
        problem = f"expected {_kind(expected)} ({expected.file}), found {_kind(tensor)}"
        findings.add(f"{tensor.file}: {name!r}", problem, code="check.other-kind")
    if not reads_bytes:
        return 0
    damaged: list[Difference] = []
    found = hash_each([tensor for tensor, _ in alike], progress, damaged)
    wanted = hash_each([expected for _, expected in alike], progress, damaged)
    for (tensor, expected), one, two in zip(alike, found, wanted, strict=True):
        if None not in (one, two) and one != two:
            problem = f"expected {PREFIX}{two} ({expected.file}), found {PREFIX}{one}"
            findings.add(f"{tensor.file}: {tensor.name!r}", problem, code="check.other-bytes")
    for each in damaged:
        findings.add(each.where, each.problem, code="check.unreadable")
    return sum(tensor.nbytes + expected.nbytes for tensor, expected in alike)


def _kind(tensor: TensorAt) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
