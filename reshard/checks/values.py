"""Values that training or copying broke: NaN, infinity, matrices of zeros. Read block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from manifests.errors import UserError
from reshard.tensors.finding import Findings
from reshard.transforms.arithmetic import FLOATS, count_not_finite
from stores.bundles import TensorAt


def check_values(tensors: Iterable[TensorAt], findings: Findings, progress: Callable[[int], object]) -> None:
    """Read floating-point tensors; report those that have NaN or infinity, and matrices of zeros alone.

    Vectors of zeros are common, such as biases that nobody trained.
    """
    for tensor in tensors:
        if tensor.dtype not in FLOATS or not tensor.nbytes:
            continue
        try:
            num_broken, is_zero = count_not_finite(tensor, progress)
        except UserError as error:
            findings.add_error(error)
            continue
        where = f"{tensor.file}: {tensor.name!r}"
        if num_broken:
            count = f"{num_broken} value{'s' if num_broken > 1 else ''}"
            problem, hint = f"{count} of it NaN or infinite", "take an earlier checkpoint, or download it again"
            findings.add(where, problem, hint, code="check.not-finite")
        elif is_zero and len(tensor.shape) > 1:
            hint = "was it ever written? take an earlier checkpoint, or download it again"
            findings.add(where, "all values are zero", hint, code="check.all-zero")
