"""verify: whether the bytes on disk match the manifest's digests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from manifests.errors import Parameter, UsageError
from reshard.checks.verify import VerifyOptions, VerifyResult, nbytes_to_read, verify_manifest
from reshard.copy.progress import Progress, counting
from reshard.formats.open import open_source
from stores.open import open_manifest


def verify(
    manifest: str | Path,
    *,
    against: str | Path | None = None,
    quick: bool = False,
    stages: Iterable[int] | None = None,
    public_key: str | Path | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Read every byte that a manifest names and compare digests; with `against`, also with every tensor of a source.

    Damage is reported in `differences`, not raised: one run lists all of it. `quick` reads no tensors and compares
    sizes and headers. `stages` are the indices to verify; None: all. Virtual bundles have no digests. With
    `public_key`, a PEM file, the manifest's signature is verified first: `manifest.sig` beside it.

    Units: `nbytes` in bytes; progress is called with bytes done and bytes in total.
    Raises:
        ManifestError: the manifest is damaged.
        InputError: there is no manifest or no source, or it cannot be read.
        SignatureError: the signature is missing or damaged, or of another key or manifest.
        UsageError: there is no such stage, or `quick` and `against` are combined (`options.conflict`).

    Example:
        >>> result = reshard.verify("model-pp2", against="model")
        >>> result.equal, result.num_tensors, result.differences
        (True, 39, ())
    """
    if quick and against is not None:
        problem = f"conflicts with {Parameter('against')}, which reads all tensors"
        raise UsageError(Parameter("quick"), problem, "leave one of the two out", code="options.conflict")
    read = open_manifest(manifest)
    options = VerifyOptions(
        public_key=None if public_key is None else Path(public_key),
        quick=quick,
        against=None if against is None else open_source(str(against), description=read.manifest.model.description),
        stages=None if stages is None else frozenset(stages),
    )
    return verify_manifest(read, options, counting(progress, nbytes_to_read(read.manifest, options)))
