"""diff: two checkpoints compared, whatever their layouts."""

from __future__ import annotations

from pathlib import Path

from reshard.checks.diff import DiffResult, diff_checkpoints, nbytes_to_hash
from reshard.copy.progress import Progress, counting
from reshard.formats.open import open_both


def diff(
    a: str | Path,
    b: str | Path,
    *,
    model: str | Path | None = None,
    with_norms: bool = False,
    reads_bytes: bool = False,
    progress: Progress | None = None,
) -> DiffResult:
    """Compare the weights and the optimizer state of two checkpoints, tensor by tensor, whatever their layouts.

    `a` and `b` are manifests or Hugging Face folders; `model` is that of `plan`, where no manifest describes them.
    Tensors with digests are not read, unless `reads_bytes` asks for all of them, or they differ and `with_norms` asks
    for the norm of B - A (float64, of floating-point tensors of the same shape).

    Units: progress is called with bytes read and bytes in total.
    Raises:
        SourceError, ModelError, ManifestError: one of them is not a checkpoint.
        ShardError: a file is truncated or damaged.

    Example:
        >>> done = reshard.diff("model-pp2", "model-pp4")
        >>> done.equal, done.num_equal, done.num_moved
        (True, 39, 20)
    """
    left, right = open_both(str(a), str(b), None if model is None else Path(model))
    total_nbytes = nbytes_to_hash(left, right, reads_bytes=reads_bytes)
    return diff_checkpoints(
        left, right, with_norms=with_norms, reads_bytes=reads_bytes, progress=counting(progress, total_nbytes)
    )
