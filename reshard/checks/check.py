"""check: everything that is wrong with a checkpoint of any kind, ours or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from manifests.errors import InputError, Parameter, SourceError, UnreachableError, UsageError, UserError
from manifests.schema import ModelDescription
from reshard.checks.compare import compare_checkpoints
from reshard.checks.digests import check_digests, check_digests_place, write_digests
from reshard.formats import table
from reshard.formats.open import find_format
from reshard.tensors.finding import Contents, Finding, Findings
from reshard.transforms.arithmetic import FLOATS, count_not_finite
from stores.bundles import TensorAt


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckOptions:
    """What to do beyond headers: `values` reads all floating-point tensors, `reads_bytes` all tensors of both sides."""

    values: bool = False
    against: str | None = None
    reads_bytes: bool = False
    digests: Literal["write", "verify"] | None = None
    description: ModelDescription | None = None  # of a model whose architecture is not known


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
    wrote_digests: bool = False

    @property
    def ok(self) -> bool:
        return not self.findings


def check_checkpoint(
    address: str, options: CheckOptions | None = None, progress: Callable[[int], object] = lambda nbytes: None
) -> CheckResult:
    """Check a folder of Hugging Face, DCP or DeepSpeed, a packed one, a hub repository or a bucket.

    Problems are reported, not raised. Digests are written only where nothing else was found.

    Raises:
        SourceError: there is no folder, no file in it, nothing to compare with, or no digests to verify.
        StoreError: a store refuses it.
        OutputError: digests cannot be written there.
        UsageError: a manifest or a DCP folder is described.
    """
    options, (kind, folder) = options or CheckOptions(), find_format(address)
    findings, read_nbytes = Findings(), 0

    def count(nbytes: int) -> None:
        nonlocal read_nbytes
        read_nbytes += nbytes
        progress(nbytes)

    if kind is table.HUGGINGFACE and not folder.names():  # in a bucket, any address that nothing begins with
        problem, hint = "contains no files", "check the address for typos"
        raise SourceError(str(folder), problem, hint, code="source.nothing-to-check")
    reads_tensors = options.values or options.against is not None
    if kind is not table.HUGGINGFACE and options.description is not None:
        problem = "is for Hugging Face folders; a manifest records its own description"
        raise UsageError(Parameter("model"), problem, "leave it out", code="options.model-of-manifest")
    if options.digests == "write":
        check_digests_place(folder)
    contents = Contents()
    try:
        how = table.CheckOptions(reads_tensors=reads_tensors, description=options.description, progress=count)
        contents = kind.check_folder(folder, findings, how)
    except UnreachableError:
        raise
    except InputError as error:  # of the checkpoint, or nobody could have opened the folder
        findings.add_error(error)
    if options.values:
        check_values(contents.tensors.values(), findings, count)
    if options.against is not None:
        other_kind, other_folder = find_format(options.against)
        here, stored = contents.tensors, other_kind.read_stored if kind.read_stored else None
        other = stored(other_folder) if stored else other_kind.read_weights(other_folder)
        if kind.read_stored and not stored and here:
            here = kind.read_weights(folder)
        compare_checkpoints(here, other, options.against, findings, count, reads_bytes=options.reads_bytes)
    if options.digests == "verify":
        check_digests(folder, findings, count)
    wrote = options.digests == "write" and not findings
    if wrote:
        write_digests(folder, count)
    return CheckResult(
        location=address,
        kind=kind.name,
        num_tensors=contents.num_tensors,
        num_files=contents.num_files,
        nbytes=contents.nbytes,
        read_nbytes=read_nbytes,
        findings=tuple(findings),
        wrote_digests=wrote,
    )


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
        if num_broken:
            count = f"{num_broken} value{'s' if num_broken > 1 else ''}"
            problem, hint = f"{count} of it NaN or infinite", "take an earlier checkpoint, or download it again"
            findings.add(tensor.place, problem, hint, code="check.not-finite")
        elif is_zero and len(tensor.shape) > 1:
            hint = "was it ever written? take an earlier checkpoint, or download it again"
            findings.add(tensor.place, "all values are zero", hint, code="check.all-zero")
