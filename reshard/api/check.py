"""check: is this checkpoint complete and consistent, whoever wrote it?"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from manifests.errors import Parameter, UsageError
from reshard.checks.check import CheckOptions, CheckResult, check_checkpoint
from reshard.copy.progress import Progress, counting
from reshard.formats.model_file import read_model_file


def check(
    checkpoint: str | Path,
    *,
    against: str | Path | None = None,
    model: str | Path | None = None,
    reads_bytes: bool = False,
    values: bool = False,
    digests: Literal["write", "verify"] | None = None,
    progress: Progress | None = None,
) -> CheckResult:
    """Check a checkpoint of any kind: index against files, headers, config against tensors, tokenizer.

    `checkpoint` is a Hugging Face folder, a hub repository, a bucket, a packed folder, or a folder of
    torch.distributed.checkpoint, of which the metadata is checked. `against` compares names, shapes and dtypes with
    another checkpoint, and with `reads_bytes` every byte. `values` reads all floating-point tensors and reports NaN,
    infinity and matrices of zeros. `digests` writes `digests.json` beside a local checkpoint in which no problem was
    found, or verifies every file against it. `model` is that of `plan`. Problems are reported in `findings`, not
    raised. Imports no torch.

    Units: bytes; progress is called with bytes read and 0, as the total is not known before.
    Raises:
        InputError: there is nothing there, or nothing to compare with.
        UsageError: `reads_bytes` without `against`, or a `model` of a manifest.
        ModelError: `model` is not valid.

    Example:
        >>> result = reshard.check("model")
        >>> result.ok, result.num_tensors, result.findings
        (True, 39, ())
    """
    if reads_bytes and against is None:
        problem = "compares with another checkpoint"
        hint = f"name it with {Parameter('against')}, or use {Parameter('digests', 'verify')}"
        raise UsageError(Parameter("reads_bytes"), problem, hint, code="options.conflict")
    options = CheckOptions(
        values=values,
        against=None if against is None else str(against),
        reads_bytes=reads_bytes,
        digests=digests,
        description=None if model is None else read_model_file(Path(model)),
    )
    return check_checkpoint(str(checkpoint), options, counting(progress, 0))
