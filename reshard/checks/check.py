"""check: everything that is wrong with a checkpoint of any kind, ours or not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from manifests.errors import InputError, Parameter, SourceError, UnreachableError, UsageError, UserError
from manifests.invariants import MANIFEST_NAME
from manifests.schema import ModelDescription
from reshard.archives.names import METADATA_NAME, is_deepspeed, is_megatron
from reshard.checks.compare import compare_checkpoints
from reshard.checks.digests import check_digests, check_digests_place, write_digests
from reshard.checks.model import check_model
from reshard.checks.verify import VerifyOptions, verify_manifest
from reshard.formats.dcp.check import check_dcp
from reshard.formats.dcp.read import read_dcp_tensors, read_dcp_weights
from reshard.formats.deepspeed.read import open_deepspeed
from reshard.formats.huggingface.check import read_weights
from reshard.formats.manifest.read import open_packed
from reshard.formats.megatron.read import read_megatron_weights
from reshard.formats.megatron.tracker import find_iteration
from reshard.formats.open import open_source
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.finding import Contents, Finding, Findings
from reshard.transforms.arithmetic import FLOATS, count_not_finite
from stores.base import Folder
from stores.bundles import TensorAt
from stores.manifest_file import open_manifest
from stores.open import open_store

CheckpointKind = Literal["huggingface", "manifest", "dcp", "deepspeed"]


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
    kind: CheckpointKind
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
    options, folder = options or CheckOptions(), _open(address)
    findings, read_nbytes = Findings(), 0

    def count(nbytes: int) -> None:
        nonlocal read_nbytes
        read_nbytes += nbytes
        progress(nbytes)

    files = folder.names()
    if not files:  # in a bucket, any address that nothing begins with
        problem, hint = "contains no files", "check the address for typos"
        raise SourceError(str(folder), problem, hint, code="source.nothing-to-check")
    kind = _kind(files)
    reads_tensors = options.values or options.against is not None
    if kind != "huggingface" and options.description is not None:
        problem = "is for Hugging Face folders; a manifest records its own description"
        raise UsageError(Parameter("model"), problem, "leave it out", code="options.model-of-manifest")
    if options.digests == "write":
        check_digests_place(folder)
    contents = Contents()
    try:
        if kind == "manifest":
            contents = _check_manifest(folder, findings, reads_tensors=reads_tensors)
        elif kind == "dcp":
            contents = check_dcp(folder, findings)
            if reads_tensors and not findings:
                contents = replace(contents, tensors=read_dcp_tensors(folder))
        elif kind == "deepspeed":
            contents = _contents_of(open_deepspeed(folder))
        else:
            weights = read_weights(folder, findings)
            check_model(folder, weights, findings, count, options.description)
            contents = weights.contents
    except UnreachableError:
        raise
    except InputError as error:  # of the checkpoint, or nobody could have opened the folder
        findings.add_error(error)
    if options.values:
        check_values(contents.tensors.values(), findings, count)
    if options.against is not None:
        here, other = contents.tensors, _tensors_of(options.against, are_stored=kind == "dcp")
        if kind == "dcp" and here and not _is_dcp(_open(options.against)):
            here = _dcp_weights(folder)
        compare_checkpoints(here, other, options.against, findings, count, reads_bytes=options.reads_bytes)
    if options.digests == "verify":
        check_digests(folder, findings, count)
    wrote = options.digests == "write" and not findings
    if wrote:
        write_digests(folder, count)
    return CheckResult(
        location=address,
        kind=kind,
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


def _kind(files: Collection[str]) -> CheckpointKind:
    if MANIFEST_NAME in files:
        return "manifest"
    if METADATA_NAME in files:
        return "dcp"
    return "deepspeed" if is_deepspeed(files) else "huggingface"


def _open(address: str) -> Folder:
    if address.endswith(f"/{MANIFEST_NAME}") or address == MANIFEST_NAME:
        return open_manifest(address).folder
    return find_iteration(address, open_store(address))


def _check_manifest(folder: Folder, findings: Findings, *, reads_tensors: bool) -> Contents:
    """Check a packed folder by its manifest: sizes, headers, names, and digests of its auxiliary files."""
    read = open_manifest(folder)
    done = verify_manifest(read, VerifyOptions(quick=True))
    for finding in done.differences:
        hint = (
            "" if finding.code else "copy the files that differ again, or pack again; reshard verify reads every byte"
        )
        findings.add(finding.where, finding.problem, hint, code=finding.code or "check.manifest")
    return Contents(
        num_tensors=done.num_tensors,
        num_files=sum(len(stage.shards) for stage in read.manifest.stages),
        nbytes=done.nbytes,
        tensors=open_packed(read).tensors if reads_tensors and not done.differences else {},
    )


def _is_dcp(folder: Folder) -> bool:
    return METADATA_NAME in (names := folder.names()) and MANIFEST_NAME not in names


def _dcp_weights(folder: Folder) -> Mapping[str, TensorAt]:
    return read_megatron_weights(folder) if is_megatron(folder.names()) else read_dcp_weights(folder)


def _tensors_of(address: str, *, are_stored: bool) -> Mapping[str, TensorAt]:
    """Return the tensors of the checkpoint to compare with; of a DCP folder the weights, or all that `are_stored`.

    Raises:
        SourceError: it has none that could be read.
    """
    folder = _open(address)
    if _kind(folder.names()) in ("manifest", "deepspeed"):
        return open_source(address).tensors
    if _is_dcp(folder):
        return read_dcp_tensors(folder) if are_stored else _dcp_weights(folder)
    broken = Findings()
    weights = read_weights(folder, broken)
    if not weights.contents.tensors:
        first = next(iter(broken))
        raise SourceError(first.where, first.problem, first.hint, code="source.nothing-to-compare")
    return weights.contents.tensors


def _contents_of(checkpoint: Checkpoint) -> Contents:
    """Return what a checkpoint has."""
    assert checkpoint.originals is not None, "every source has them"
    tensors = [tensor for kind in (checkpoint.tensors, *checkpoint.moments.values()) for tensor in kind.values()]
    return Contents(
        num_tensors=len(tensors),
        num_files=len(checkpoint.originals.files),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        tensors=checkpoint.tensors,
    )
