"""check: everything that is wrong with a checkpoint of any kind, ours or not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from manifests.errors import InputError, Parameter, SourceError, UnreachableError, UsageError, UserError
from reshard.checks.compare import compare_checkpoints
from reshard.checks.verify import check_packed
from reshard.copy.runs import ByteCounter, Progress, counting
from reshard.formats.open import find_format, read_model_file
from reshard.formats.table import HUGGINGFACE, MANIFEST, CheckOptions
from reshard.tensors.comparison import Contents, Finding, Findings
from reshard.transforms.arithmetic import FLOATS, count_not_finite
from stores.bundles import TensorAt


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What was looked at, and what is wrong with it.

    Units: `nbytes` is what tensors take, `read_nbytes` what was read of files beyond their headers, in bytes.
    """

    location: str
    kind: str
    num_tensors: int
    num_files: int
    nbytes: int
    read_nbytes: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


def check(
    checkpoint: str | Path,
    *,
    against: str | Path | None = None,
    model: str | Path | None = None,
    reads_bytes: bool = False,
    values: bool = False,
    progress: Progress | None = None,
) -> CheckResult:
    """Check a checkpoint of any kind: index against files, headers, config against tensors, tokenizer.

    `checkpoint` is a Hugging Face folder, a hub repository, a bucket, a packed folder, or a folder of
    torch.distributed.checkpoint, of which the metadata is checked. `against` compares names, shapes and dtypes with
    another checkpoint, and with `reads_bytes` every byte. `values` reads all floating-point tensors and reports NaN,
    infinity and matrices of zeros. `model` is that of `plan`. Problems are reported in `findings`, not raised.
    Imports no torch.

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
        hint = f"name it with {Parameter('against')}"
        raise UsageError(Parameter("reads_bytes"), problem, hint, code="options.conflict")
    description = None if model is None else read_model_file(Path(model))
    address, counter = str(checkpoint), counting(progress, 0)
    kind, folder = find_format(address)
    findings, read_nbytes = Findings(), 0

    def count(nbytes: int) -> None:
        nonlocal read_nbytes
        read_nbytes += nbytes
        counter(nbytes)

    if kind is HUGGINGFACE and not folder.names():  # in a bucket, any address that nothing begins with
        problem, hint = "contains no files", "check the address for typos"
        raise SourceError(str(folder), problem, hint, code="source.nothing-to-check")
    reads_tensors = values or against is not None
    if kind is not HUGGINGFACE and description is not None:
        problem = "is for Hugging Face folders; a manifest records its own description"
        raise UsageError(Parameter("model"), problem, "leave it out", code="options.model-of-manifest")
    contents = Contents()
    try:
        how = CheckOptions(reads_tensors=reads_tensors, description=description, progress=count)
        check_folder = check_packed if kind is MANIFEST else kind.check_folder
        contents = check_folder(folder, findings, how)
    except UnreachableError:
        raise
    except InputError as error:  # of the checkpoint, or nobody could have opened the folder
        findings.add_error(error)
    if values:
        check_values(contents.tensors.values(), findings, count)
    if against is not None:
        other_kind, other_folder = find_format(str(against))
        here, both_stored = contents.tensors, kind.stored is not None and other_kind.stored is not None
        other = other_kind.read_stored(other_folder) if both_stored else other_kind.read_weights(other_folder)
        if kind.stored is not None and not both_stored and here:
            here = kind.read_weights(folder)
        compare_checkpoints(here, other, str(against), findings, count, reads_bytes=reads_bytes)
    return CheckResult(
        location=address,
        kind=kind.name,
        num_tensors=contents.num_tensors,
        num_files=contents.num_files,
        nbytes=contents.nbytes,
        read_nbytes=read_nbytes,
        findings=tuple(findings),
    )


def check_values(tensors: Iterable[TensorAt], findings: Findings, progress: ByteCounter) -> None:
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
        if num_broken:
            count = f"{num_broken} value{'s' if num_broken > 1 else ''}"
            problem, hint = f"{count} of it NaN or infinite", "take an earlier checkpoint, or download it again"
            findings.add(tensor.place, problem, hint, code="check.not-finite")
        elif is_zero and len(tensor.shape) > 1:
            hint = "was it ever written? take an earlier checkpoint, or download it again"
            findings.add(tensor.place, "all values are zero", hint, code="check.all-zero")
