"""verify: whether the bytes on disk match the manifest's digests, and its source."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from manifests.digest import PREFIX
from manifests.errors import InputError, UsageError
from manifests.headertext import NO_NAMES
from manifests.invariants import SOURCE_NAME
from manifests.models import ModelShape, module_of
from manifests.schema import MOMENTS, WEIGHTS, Holds, Manifest, Stage
from reshard.copy.runs import ByteCounter
from reshard.operations.compare import Difference, differences_from, hash_each, missing_from
from reshard.operations.index_check import index_differences, read_own_index
from reshard.operations.signature import Signature, check_signature
from reshard.sources.bundles import describe, open_described
from reshard.sources.weight_map import ShardIndex
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint, TensorAt
from reshard.tensors.slices import merge_slices
from stores.base import Blocks, Folder, check_whole
from stores.bundles import Bundles, join_slices
from stores.manifest_file import Address, find_manifest_file

__all__ = ["VerifyOptions", "VerifyResult", "nbytes_to_read", "verify_manifest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """What to verify: `quick` reads no tensors; `against` is a source that must have the same tensors and files."""

    quick: bool = False
    against: Checkpoint | None = None
    stages: frozenset[int] | None = None  # None: all
    signature: Signature | None = None  # of the manifest, checked before anything else


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
        """The code of a signed checkpoint whose files are not those that were signed, or ""."""
        code = "signature.changed-file"
        return code if self.signature is not None and self.differences else ""


def verify_manifest(
    address: Address, options: VerifyOptions | None = None, progress: ByteCounter = lambda nbytes: None
) -> VerifyResult:
    """Verify every file of a manifest: sizes, headers, source fingerprints, digests and the index.

    Damage is reported, not raised: one run lists all of it. Virtual bundles have no digests; their bytes are read if
    there is a source to compare them with.

    Raises:
        ManifestError: the manifest is damaged.
        InputError: there is no manifest, or it cannot be read.
        SignatureError: its signature, if it is asked for, is not of this manifest and that key.
        UsageError: it has no such stage.
    """
    options = options or VerifyOptions()
    file = find_manifest_file(address)
    manifest, digest = file.read()
    signature = None if options.signature is None else check_signature(file, digest, options.signature)
    stages, described = _choose(manifest, options.stages), None
    with suppress(InputError):  # reported at the end, if nothing else is
        described = describe(file, manifest, digest)
    bundles = Bundles(manifest, file.folder, described.names if described else NO_NAMES)
    index = read_own_index(manifest, file.folder, bundles.names)
    bundles.read_ahead(stages, (WEIGHTS, *MOMENTS))
    differences: list[Difference] = []
    kinds = {holds: _read_headers(bundles, stages, holds, differences) for holds in (WEIGHTS, *MOMENTS)}
    of_index = [index] if isinstance(index, Difference) else []
    if isinstance(index, ShardIndex) and not differences:
        of_index += index_differences(index, manifest, file.folder, stages, kinds[WEIGHTS])
    index, bundles.names = None, NO_NAMES
    tensors = [tensor for found in kinds.values() for tensor in found]
    compared = [tensor for tensor in tensors if options.against or (tensor.blake3 and not options.quick)]
    digests = hash_each(compared, progress, differences)
    differences += _unlike_their_digests(compared, digests)
    differences += _unlike_their_files(manifest, file.folder)
    num_beyond = 0
    if options.against is not None:
        known = dict(zip(compared, digests, strict=True))
        for holds, found in kinds.items():
            expected = options.against.tensors if holds == WEIGHTS else options.against.moments.get(holds)
            if expected is None:  # a source without optimizer state
                num_beyond += len({tensor.name for tensor in found})
                continue
            stored = _whole(found, known, differences, progress)
            differences += differences_from(expected, stored, manifest.ties, progress)
            dropped = described.record.dropped if described else ()
            wanted = _wanted(expected, options.against.shape, stages, manifest, dropped)
            differences += missing_from({tensor.name for tensor in found}, list(wanted), manifest.ties)
        differences += _unlike_files_of(options.against, manifest, file.folder)
    if not differences and options.stages is None:
        try:
            open_described(described or describe(file, manifest, digest), bundles)
        except InputError as error:  # an incomplete model, its files intact
            differences, of_index = [Difference(error.where, error.problem)], []
    differences += of_index
    return VerifyResult(
        num_tensors=sum(len({tensor.name for tensor in found}) for found in kinds.values()),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        compared_nbytes=sum(tensor.nbytes for tensor in compared),
        source=options.against.location if options.against else None,
        num_beyond=num_beyond,
        differences=tuple(dict.fromkeys(differences)),  # stages may share original files
        signature=signature,
    )


def nbytes_to_read(address: Address, options: VerifyOptions) -> int:
    """Return an estimate of the bytes to read; raises as `verify_manifest`."""
    stages = _choose(find_manifest_file(address).read()[0], options.stages)
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


def _read_headers(
    bundles: Bundles, stages: Sequence[Stage], holds: Holds, differences: list[Difference]
) -> list[TensorAt]:
    tensors = []
    for read in (part for stage in stages for part in bundles.parts_of(stage, (holds,))):
        try:
            tensors += read()
        except InputError as error:
            differences.append(Difference(error.where, error.problem))
    return tensors


def _whole(
    found: Sequence[TensorAt],
    digests: Mapping[TensorAt, str | None],
    differences: list[Difference],
    progress: ByteCounter,
) -> Mapping[TensorAt, str | None]:
    """Return whole tensors with their hex digests; those that are stored in slices are read again."""
    try:
        joined = join_slices(found).values()
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
