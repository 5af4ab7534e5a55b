"""verify: whether the bytes on disk match the manifest's digests, and its source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from manifests.digest import PREFIX
from manifests.errors import InputError, UsageError
from manifests.headertext import NO_NAMES
from manifests.invariants import SOURCE_NAME
from manifests.models import ModelShape, module_of
from manifests.schema import MOMENTS, WEIGHTS, Holds, Manifest, Stage, TieGroup
from reshard.checks.compare import Difference, differences_from, hash_each, in_batches, missing_from
from reshard.checks.index_check import index_differences, misleading_files, read_own_index
from reshard.checks.signature import check_signature
from reshard.copy.runs import ByteCounter
from reshard.formats.huggingface.weight_map import ShardIndex
from reshard.formats.manifest.read import describe, open_described
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.slices import merge_slices
from stores.base import Blocks, Folder, check_whole
from stores.bundles import Bundles, TensorAt, join_slices
from stores.manifest_file import ReadManifest

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
    differences: tuple[Difference, ...]
    signature: str | None = None  # where it is, if it was asked for

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def code(self) -> str:
        """The code of a signed checkpoint whose files are not those that were signed, else of what differs, or ""."""
        code = "signature.changed-file"
        codes = [difference.code for difference in self.differences if difference.code]
        return code if self.signature is not None and self.differences else next(iter(codes), "")


def verify_manifest(
    read: ReadManifest, options: VerifyOptions | None = None, progress: ByteCounter = lambda nbytes: None
) -> VerifyResult:
    """Verify every file of a manifest: sizes, headers, source fingerprints, digests and the index.

    Damage is reported, not raised: one run lists all of it. Virtual bundles have no digests; their bytes are read if
    there is a source to compare them with.

    Raises:
        SignatureError: its signature, if it is asked for, is not of this manifest and that key.
        UsageError: it has no such stage.
    """
    options = options or VerifyOptions()
    manifest = read.manifest
    signature = None if options.public_key is None else check_signature(read, options.public_key)
    stages, described = _choose(manifest, options.stages), None
    with suppress(InputError):  # reported at the end, if nothing else is
        described = describe(read, options.against.shape if options.against else None)
    bundles = Bundles(manifest, read.folder, described.names if described else NO_NAMES)
    index = read_own_index(manifest, read.folder, bundles.names)
    bundles.read_ahead(stages, (WEIGHTS, *MOMENTS))
    differences: list[Difference] = []
    readers_by_kind = {holds: _intact_readers(bundles, stages, holds, differences) for holds in (WEIGHTS, *MOMENTS)}
    of_index = [index] if isinstance(index, Difference) else []
    if isinstance(index, ShardIndex) and not differences:
        of_index += index_differences(index, manifest, read.folder, stages, _each(readers_by_kind[WEIGHTS]))
    index, bundles.names = None, NO_NAMES
    counts, of_source = _Counts(), list[Difference]()
    for holds, readers in readers_by_kind.items():
        expected = None if options.against is None else _expected(options.against, holds)
        names = _compare(readers, expected, manifest.ties, options, progress, counts, (differences, of_source))
        if options.against is not None and expected is None:  # a source without optimizer state
            counts.num_beyond += len(names)
        elif options.against is not None and expected is not None:
            dropped = described.record.dropped if described else ()
            wanted = _wanted(expected, options.against.shape, stages, manifest, dropped)
            of_source += missing_from(names, wanted, manifest.ties)
        del names  # of a million tensors, they take 40 MB
    differences += _unlike_their_files(manifest, read.folder)
    if options.against is not None:
        differences += [*of_source, *_unlike_files_of(options.against, manifest, read.folder)]
    if not differences and options.stages is None:
        try:
            open_described(described or describe(read), bundles)
        except InputError as error:  # an incomplete model, its files intact
            differences, of_index = [Difference(error.where, error.problem)], []
    differences += of_index
    differences += misleading_files(manifest, read.folder, read.name)
    return VerifyResult(
        num_tensors=counts.num_tensors,
        nbytes=counts.nbytes,
        compared_nbytes=counts.compared_nbytes,
        source=options.against.location if options.against else None,
        num_beyond=counts.num_beyond,
        differences=tuple(dict.fromkeys(differences)),  # stages may share original files
        signature=signature,
    )


def nbytes_to_read(manifest: Manifest, options: VerifyOptions) -> int:
    """Return an estimate of the bytes to read; refuses stages that do not exist, as `verify_manifest`."""
    stages = _choose(manifest, options.stages)
    own = 0 if options.quick else sum(shard.nbytes for stage in stages for shard in stage.shards)
    return own if options.against is None else own + sum(stage.nbytes * (2 if stage.spans else 1) for stage in stages)


def _choose(manifest: Manifest, wanted: frozenset[int] | None) -> list[Stage]:
    for index in sorted(wanted or ()):
        if index >= len(manifest.stages):
            raise UsageError(
                "--stage",
                f"expected a stage from 0 to {len(manifest.stages) - 1}, found {index}",
                "stages are numbered from 0",
                code="options.unknown-stage",
            )
    return [stage for stage in manifest.stages if wanted is None or stage.index in wanted]


@dataclass(slots=True)
class _Counts:
    """What `VerifyResult` counts, while it is counted."""

    num_tensors: int = 0
    nbytes: int = 0
    compared_nbytes: int = 0
    num_beyond: int = 0


def _intact_readers(
    bundles: Bundles, stages: Sequence[Stage], holds: Holds, differences: list[Difference]
) -> list[_FileReader]:
    """Read the headers of these stages; return what yields the tensors of each file whose header is intact."""
    readers = []
    for read in (read for stage in stages for read in bundles.file_readers(stage, (holds,))):
        try:
            read()
            readers.append(read)
        except InputError as error:
            differences.append(Difference(error.where, error.problem))
    return readers


def _each(readers: Iterable[_FileReader]) -> Iterator[TensorAt]:
    return (tensor for read in readers for tensor in read())


def _expected(source: Checkpoint, holds: Holds) -> Mapping[str, TensorAt] | None:
    return source.tensors if holds == WEIGHTS else source.moments.get(holds)


def _compare(
    readers: Sequence[_FileReader],
    expected: Mapping[str, TensorAt] | None,
    ties: Sequence[TieGroup],
    options: VerifyOptions,
    progress: ByteCounter,
    counts: _Counts,
    differences: tuple[list[Difference], list[Difference]],
) -> Collection[str]:
    """Compare tensors, some at a time, with their digests and with those of the source; return their names.

    `differences` are those from the digests and those from the source.
    """
    of_bytes, of_source = differences
    are_whole: dict[str, bool] = {}
    sliced: dict[TensorAt, str | None] = {}
    twice: set[str] = set()
    for tensors in in_batches(_each(readers)):
        compared = [tensor for tensor in tensors if options.against or (tensor.blake3 and not options.quick)]
        digests = hash_each(compared, progress, of_bytes)
        of_bytes += _unlike_their_digests(compared, digests)
        counts.nbytes += sum(tensor.nbytes for tensor in tensors)
        counts.compared_nbytes += sum(tensor.nbytes for tensor in compared)
        found = dict(zip(compared, digests, strict=True)) if expected is not None else {}
        for tensor in tensors:
            is_whole = tensor.part is None
            if tensor.name in are_whole and (is_whole or are_whole[tensor.name]):
                twice.add(tensor.name)
            are_whole[tensor.name] = is_whole
            if not is_whole and tensor in found:
                sliced[tensor] = found.pop(tensor)
        if expected is not None:
            of_source += differences_from(expected, found, ties, progress)
    counts.num_tensors += len(are_whole)
    if expected is not None:
        sliced |= {tensor: None for tensor in _each(readers) if tensor.name in twice} if twice else {}
        of_source += differences_from(expected, _merged(sliced, of_source, progress), ties, progress)
    return are_whole


def _merged(
    digests: Mapping[TensorAt, str | None], differences: list[Difference], progress: ByteCounter
) -> Mapping[TensorAt, str | None]:
    """Return the tensors of these slices with their hex digests, for which they are read again."""
    try:
        joined = join_slices(digests).values()
    except InputError as error:
        differences.append(Difference(error.where, error.problem))
        return {}
    whole = {merge_slices(parts): digests[parts[0]] for parts in joined if len(parts) == 1}
    sliced = [parts for parts in joined if len(parts) > 1]
    merged = [merge_slices(parts) for parts in sliced if all(digests[part] == part.digest for part in parts)]
    return whole | dict(zip(merged, hash_each(merged, progress, differences), strict=True))


def _unlike_their_digests(tensors: Sequence[TensorAt], digests: Sequence[str | None]) -> Iterator[Difference]:
    for tensor, found in zip(tensors, digests, strict=True):
        if None not in (found, tensor.blake3) and found != tensor.digest:
            problem = f"expected {PREFIX}{tensor.digest}, found {PREFIX}{found}"
            yield Difference(f"{tensor.file}: {tensor.name!r}", problem)


def _unlike_their_files(manifest: Manifest, folder: Folder) -> Iterator[Difference]:
    for auxiliary in manifest.files:
        try:
            check_whole(folder.file(auxiliary.path), auxiliary.compared_digest)
        except InputError as error:
            yield Difference(error.where, error.problem)


def _unlike_files_of(source: Checkpoint, manifest: Manifest, folder: Folder) -> Iterator[Difference]:
    """Compare auxiliary files, by their digests, with those of a source; `source.json` is the manifest's own."""
    expected = {auxiliary.path: auxiliary for auxiliary in source.auxiliary}
    found = {auxiliary.path: auxiliary.digest for auxiliary in manifest.files if auxiliary.path != SOURCE_NAME}
    for path, digest in found.items():
        if path not in expected:
            yield Difference(str(folder.file(path)), f"is not in {source.location}")
        elif (other := _digest_of(expected[path])) != digest:
            yield Difference(str(folder.file(path)), f"expected {other} ({source.location}), found {digest}")
    for path in sorted(expected.keys() - found.keys()):
        yield Difference(str(folder.file(path)), f"is in {source.location}, but not in the manifest")


def _digest_of(auxiliary: AuxiliaryAt) -> str:
    if auxiliary.digest is not None:
        return auxiliary.digest
    blocks = Blocks(auxiliary.file)
    for _ in blocks:
        pass
    return blocks.digest


def _wanted(
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
