"""verify: are the bytes on disk what the manifest says?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from manifests.errors import UsageError
from reshard.operations.progress import Progress, counting
from reshard.operations.verify import VerifyOptions, VerifyResult, nbytes_to_read, verify_manifest
from reshard.sources.open import open_source

__all__ = ["verify"]


def verify(
    manifest: str | Path,
    *,
    against: str | Path | None = None,
    quick: bool = False,
    stages: Iterable[int] | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Read every byte that a manifest names and compare digests; with `against`, with every tensor of a source too.

    Damage is reported in `differences`, not raised: one run names all of it. `quick` reads no tensor and compares
    sizes and headers. `stages` are the indices to look at; None: all. Virtual bundles have no digests of their own.

    Units: `nbytes` in bytes; progress is called with bytes done and bytes in total.
    Raises:
        InputError: there is no readable manifest or source.
        UsageError: no such stage; `options.conflict` for `quick` beside `against`.

    Example:
        >>> result = reshard.verify("model-pp2", against="model")
        >>> result.equal, result.num_tensors, result.differences
        (True, 39, ())
    """
    if quick and against is not None:
        problem = "reads no tensor, --against reads all of them"
        raise UsageError("--quick", problem, "leave one of the two out", code="options.conflict")
    options = VerifyOptions(
        quick=quick,
        against=None if against is None else open_source(str(against)),
        stages=None if stages is None else frozenset(stages),
    )
    return verify_manifest(manifest, options, counting(progress, nbytes_to_read(manifest, options)))
