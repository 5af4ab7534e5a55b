"""verify: whether the bytes on disk match the manifest's digests, and its source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from manifests.digest import PREFIX
from manifests.errors import InputError, Parameter, UsageError, as_int
from manifests.invariants import SOURCE_FILES, SOURCE_NAME
from manifests.models import ModelShape, module_of
from manifests.models.adapters import LORA_A, has_adapters
from manifests.optimizer_state import stored_kinds
from manifests.schema import GIT_ATTRIBUTES_NAME, MODEL_CARD_NAME, WEIGHTS, Holds, Manifest, Stage, TieGroup
from manifests.trained import RUN_FILES
from reshard.checks.compare import (
    check_index,
    check_names,
    compare_with_source,
    hash_each,
    read_index,
    report_missing,
    tensors_of,
)
from reshard.checks.signature import check_signature
from reshard.copy.runs import ByteCounter, Progress, counting
from reshard.formats.manifest.read import adapters_in, describe, open_packed, open_with_bundles
from reshard.formats.open import open_source
from reshard.formats.table import CheckOptions
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.comparison import Contents, Finding, Findings, compare
from reshard.tensors.slices import merge_slices
from stores.base import Folder, check_whole
from stores.bundles import Bundles, TensorAt, join_slices
from stores.open import ReadManifest, open_manifest

_FileReader = Callable[[], Iterable[TensorAt]]  # yields the tensors of a file of a bundle


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """What to verify: `quick` reads no tensors; `against` is a source that must have the same tensors and files."""

    quick: bool = False
    against: Checkpoint | None = None
    stages: frozenset[int] | None = None  # None: all
    public_key: Path | None = None  # of the manifest's signature, which is checked before anything else


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResult:
    """The result of verifying a manifest.

    Of `nbytes` of tensor data, `compared_nbytes` were compared with digests or with `source`; `differences` lists
    everything that does not match.
    """

    num_tensors: int
    nbytes: int
    compared_nbytes: int
    source: str | None
    num_beyond: int  # tensors of the optimizer state, if the source has none
    differences: tuple[Finding, ...]
    signature: str | None = None  # where it is, if a public key was given

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def code(self) -> str:
        """The code of a signed checkpoint whose files are not those that were signed, else of what differs, or ""."""
        code = "signature.changed-file"
        codes = [difference.code for difference in self.differences if difference.code]
        return code if self.signature is not None and self.differences else next(iter(codes), "")


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
        against=None if against is None else _open_against(str(against), read),
        stages=None if stages is None else _indices(stages),
    )
    return verify_manifest(read, options, counting(progress, _nbytes_to_read(read.manifest, options)))


def verify_manifest(
    read: ReadManifest, options: VerifyOptions, progress: ByteCounter = lambda nbytes: None
) -> VerifyResult:
    """Verify every file of a manifest: sizes, headers, source fingerprints, digests and the index.

    Damage is reported, not raised: one run lists all of it. Virtual bundles have no digests; their bytes are read if
    there is a source to compare them with.
    """
    manifest = read.manifest
    signature = None if options.public_key is None else check_signature(read, options.public_key)
    stages, dropped = _choose(manifest, options.stages), tuple[str, ...]()
    if options.against is not None:
        dropped = tuple(map(options.against.shape.fqn_of, _dropped(read)))
    bundles = Bundles(manifest, read.folder)
    findings, of_index, of_source = Findings(), Findings(), Findings()
    index = read_index(manifest, read.folder, of_index)
    kinds = stored_kinds(manifest)
    bundles.read_ahead(stages, kinds)
    readers_by_kind = {holds: _intact_readers(bundles, stages, holds, findings) for holds in kinds}
    if index is not None and not findings:
        check_index(index, manifest, read.folder, stages, _tensors_of(readers_by_kind[WEIGHTS]), of_index)
    del index  # of all tensors, as what follows
    counts = _Counts()
    for holds, readers in readers_by_kind.items():
        expected = None if options.against is None else tensors_of(options.against, holds)
        names = _compare(readers, expected, manifest.ties, options, progress, counts, (findings, of_source))
        if options.against is not None and expected is None:  # a source without optimizer state
            counts.num_beyond += len(names)
        elif options.against is not None and expected is not None:
            sources = _belonging(expected, options.against.shape, stages, manifest, dropped)
            report_missing(names, sources, expected, manifest.ties, progress, of_source)
    _check_files(manifest, read.folder, findings)
    if options.against is not None:
        findings.extend(of_source)
        _compare_files(options.against, manifest, read.folder, findings)
    if not findings and options.stages is None and not has_adapters(manifest):
        try:
            open_with_bundles(describe(read), bundles)
        except InputError as error:  # an incomplete model, its files intact
            findings.add(error.where, error.problem)
            of_index = Findings()
    findings.extend(of_index)
    check_names(manifest, read.folder, read.name, findings)
    return VerifyResult(
        **asdict(counts),
        source=options.against.location if options.against else None,
        differences=tuple(findings),
        signature=signature,
    )


def _open_against(source: str, read: ReadManifest) -> Checkpoint:
    """Open a source without the tensors that packing dropped, which its model may lack."""
    description = read.manifest.model.description
    if dropped := _dropped(read):
        try:
            return open_source(source, frozenset(dropped), description)
        except InputError as error:  # of an export or a manifest, or a model that needs them
            if error.code not in ("options.unknown-drop", "options.drop-from-manifest", "source.missing-tensor"):
                raise
    return open_source(source, description=description)


def _dropped(read: ReadManifest) -> tuple[str, ...]:
    with suppress(InputError):  # reported at the end, if nothing else is
        return describe(read).record.dropped
    return ()


def check_packed(folder: Folder, findings: Findings, options: CheckOptions) -> Contents:
    """Check a packed folder by its manifest: sizes, headers, names, and digests of its auxiliary files."""
    read = open_manifest(folder)
    done = verify_manifest(read, VerifyOptions(quick=True))
    again = "copy the files that differ again, or pack again; reshard verify reads every byte"
    for finding in done.differences:
        hint = "" if finding.code else again
        findings.add(finding.where, finding.problem, hint, code=finding.code or "check.manifest")
    tensors, state = _tensors_to_read(read) if options.reads_tensors and not done.differences else ({}, ())
    return Contents(
        num_tensors=done.num_tensors,
        num_files=sum(len(stage.shards) for stage in read.manifest.stages),
        nbytes=done.nbytes,
        tensors=tensors,
        state=state,
    )


def _tensors_to_read(read: ReadManifest) -> tuple[Mapping[str, TensorAt], Sequence[TensorAt]]:
    """Return the weights, and what may be zero: optimizer state, and the matrices of adapters that begin as zeros."""
    if not has_adapters(read.manifest):
        opened = open_packed(read)
        return opened.tensors, opened.state
    stored = adapters_in(read)
    state = [
        tensor
        for kind, tensors in stored.items()
        for tensor in tensors
        if kind != WEIGHTS or not tensor.name.endswith(LORA_A)
    ]
    return {tensor.name: tensor for tensor in stored[WEIGHTS]}, state


def _nbytes_to_read(manifest: Manifest, options: VerifyOptions) -> int:
    """Return an estimate of the bytes to read; refuses stages that do not exist, as `verify_manifest`."""
    stages = _choose(manifest, options.stages)
    nbytes = 0 if options.quick else sum(shard.nbytes for stage in stages for shard in stage.shards)
    if options.against is not None:
        nbytes += sum(stage.nbytes * (2 if stage.spans else 1) for stage in stages)
    return nbytes


def _indices(stages: object) -> frozenset[int]:
    indices = tuple(map(as_int, stages)) if isinstance(stages, Iterable) else (stages,)
    numbers = [index for index in indices if type(index) is int]
    if not isinstance(stages, Iterable) or not indices or len(numbers) < len(indices):
        problem = f"expected indices of stages, such as [0, 1], found {str(stages)[:80]}"
        raise UsageError(Parameter("stages"), problem, code="options.invalid-value")
    return frozenset(numbers)


def _choose(manifest: Manifest, indices: frozenset[int] | None) -> list[Stage]:
    for index in sorted(indices or ()):
        if not 0 <= index < len(manifest.stages):
            raise UsageError(
                Parameter("stages"),
                f"expected a stage from 0 to {len(manifest.stages) - 1}, found {index}",
                "stages are numbered from 0",
                code="options.unknown-stage",
            )
    return [stage for stage in manifest.stages if indices is None or stage.index in indices]


@dataclass(slots=True)
class _Counts:
    """What `VerifyResult` counts, while it is counted."""

    num_tensors: int = 0
    nbytes: int = 0
    compared_nbytes: int = 0
    num_beyond: int = 0


def _intact_readers(bundles: Bundles, stages: Sequence[Stage], holds: Holds, findings: Findings) -> list[_FileReader]:
    """Read the headers of these stages; return what yields the tensors of each file whose header is intact."""
    readers = []
    for read in (read for stage in stages for read in bundles.file_readers(stage, (holds,))):
        try:
            read()
            readers.append(read)
        except InputError as error:
            findings.add(error.where, error.problem)
    return readers


def _tensors_of(readers: Iterable[_FileReader]) -> Iterator[TensorAt]:
    return (tensor for read in readers for tensor in read())


def _compare(
    readers: Sequence[_FileReader],
    expected: Mapping[str, TensorAt] | None,
    ties: Sequence[TieGroup],
    options: VerifyOptions,
    progress: ByteCounter,
    counts: _Counts,
    findings: tuple[Findings, Findings],
) -> Collection[str]:
    """Compare tensors with their digests and with those of the source; return their names.

    `findings` are those of the digests and those of the source.
    """
    of_bytes, of_source = findings
    tensors = list(_tensors_of(readers))
    compared = [tensor for tensor in tensors if options.against or (tensor.blake3 and not options.quick)]
    digests = dict(zip(compared, hash_each(compared, progress, of_bytes), strict=True))
    _check_digests(digests, of_bytes)
    counts.nbytes += sum(tensor.nbytes for tensor in tensors)
    counts.compared_nbytes += sum(tensor.nbytes for tensor in compared)
    by_name: dict[str, list[TensorAt]] = {}
    for tensor in tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    counts.num_tensors += len(by_name)
    if expected is not None:
        whole = {tensor: digest for tensor, digest in digests.items() if tensor.part is None}
        compare_with_source(expected, whole, ties, progress, of_source)
        sliced = {tensor: digest for tensor, digest in digests.items() if tensor.part is not None}
        for parts in by_name.values():
            if len(parts) > 1 and any(part.part is None for part in parts):  # stored twice
                sliced |= dict.fromkeys(parts)
        compare_with_source(expected, _merged(sliced, of_source, progress), ties, progress, of_source)
    return by_name


def _merged(
    digests: Mapping[TensorAt, str | None], findings: Findings, progress: ByteCounter
) -> Mapping[TensorAt, str | None]:
    """Return the tensors of these slices with their hex digests, for which they are read again."""
    try:
        joined = join_slices(digests).values()
    except InputError as error:
        findings.add(error.where, error.problem)
        return {}
    whole = {merge_slices(parts): digests[parts[0]] for parts in joined if len(parts) == 1}
    sliced = [parts for parts in joined if len(parts) > 1]
    merged = [merge_slices(parts) for parts in sliced if all(digests[part] == part.digest for part in parts)]
    return whole | dict(zip(merged, hash_each(merged, progress, findings), strict=True))


def _check_digests(digests: Mapping[TensorAt, str | None], findings: Findings) -> None:
    for tensor, digest in digests.items():
        if None not in (digest, tensor.blake3) and digest != tensor.digest:
            findings.add(tensor.place, f"expected {PREFIX}{tensor.digest}, found {PREFIX}{digest}")


def _check_files(manifest: Manifest, folder: Folder, findings: Findings) -> None:
    for auxiliary in manifest.files:
        try:
            check_whole(folder.file(auxiliary.path), auxiliary.compared_digest)
        except InputError as error:
            findings.add(error.where, error.problem)


def _compare_files(source: Checkpoint, manifest: Manifest, folder: Folder, findings: Findings) -> None:
    """Compare auxiliary files, by their digests, with those of a source; `source.json` is the manifest's own.

    A model card may differ: people edit it. `.gitattributes` is left out: it says how a repository stores its files.
    """
    ignored = {SOURCE_NAME, GIT_ATTRIBUTES_NAME, f"{SOURCE_FILES}{GIT_ATTRIBUTES_NAME}"}
    digests = {item.path: item.digest for item in manifest.files if item.path not in ignored}
    expected = {
        item.path: (item.digest or check_whole(item.file)) if item.path in digests else ""
        for item in source.auxiliary
        if item.path not in ignored
    }
    comparison = compare(expected, digests)
    for path in (path for path in comparison.unexpected if path not in RUN_FILES):
        findings.add(f"{folder}/{path}", f"is not in {source.location}")
    for path in (path for path in comparison.different if path != MODEL_CARD_NAME):
        findings.add(f"{folder}/{path}", f"expected {expected[path]} ({source.location}), found {digests[path]}")
    for path in sorted(comparison.missing):
        findings.add(f"{folder}/{path}", f"is in {source.location}, but not in the manifest")


def _belonging(
    tensors: Mapping[str, TensorAt],
    shape: ModelShape,
    stages: Sequence[Stage],
    manifest: Manifest,
    dropped: Collection[str],
) -> Iterator[TensorAt]:
    """Yield the source's tensors that belong to these stages, except those that were dropped or are recomputed."""
    dropped = set(dropped)
    modules = {module for stage in stages for module in stage.modules}
    is_all = len(stages) == len(manifest.stages)
    for fqn, tensor in tensors.items():
        is_recomputed = manifest.training is not None and fqn not in shape.tensors
        if fqn not in dropped and not is_recomputed and (is_all or module_of(fqn, modules) is not None):
            yield tensor
