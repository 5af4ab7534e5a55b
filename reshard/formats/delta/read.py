"""A version of a chain as a source: its tensors are computed from the full version before it and the deltas since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manifests.digest import split_digests
from manifests.errors import SourceError
from manifests.invariants import SOURCE_FILES
from manifests.safetensors import DIGESTS_KEY
from manifests.schema import Source
from reshard.copy.engine import hash_tensors
from reshard.copy.journal import is_working_name
from reshard.formats.delta.chain import Chain, ChainAt, Version, list_versions, read_patches, state_digest
from reshard.formats.delta.codec import BAD_DELTA, Patch, patched
from reshard.formats.huggingface.read import open_checkpoint as open_folder
from reshard.formats.table import ListedTensor, Listing, OpenOptions
from reshard.formatting import some
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.source_index import record_anew
from stores.base import Folder, InputFile
from stores.bundles import TensorAt
from stores.local import LocalFolder


def open_checkpoint(folder: Folder, options: OpenOptions) -> Checkpoint:
    """Open a chain at its newest version, or that of `CHAIN@N`.

    Tensors without a digest are read if there is a recorded state to compare, which nobody else would.
    """
    chain, number = _chain_at(folder)
    opened = open_version(chain, number, options)
    check_files(opened, chain.version(number), str(chain))
    is_known = options.drop or state_digest(opened.tensors.values()) is not None
    if not is_known and (version := chain.version(number)).state is not None:
        opened = with_all_digests(opened)
        check_state(opened.tensors.values(), version, str(chain))
    return opened


def list_tensors(folder: Folder) -> Listing:
    """Return the tensors of a chain at its newest version, or that of `CHAIN@N`."""
    chain, number = _chain_at(folder)
    tensors = tuple(
        ListedTensor(name=tensor.name, part="model", dtype=tensor.dtype, shape=tensor.shape)
        for tensor in open_version(chain, number).tensors.values()
    )
    num_files = sum(len(set(version.weight_map.values())) for version in chain.line(number))
    return Listing(format="delta", title=f"version {number} of a chain", num_files=num_files, tensors=tensors)


def _chain_at(folder: Folder) -> tuple[Chain, int]:
    at = folder if isinstance(folder, ChainAt) else ChainAt(folder, None)
    chain = list_versions(at.folder)
    number = chain.numbers[-1] if at.number is None and chain.numbers else at.number or 0
    return chain, number


def open_version(
    chain: Chain,
    number: int,
    options: OpenOptions | None = None,
    *,
    base: Checkpoint | None = None,
    verifies_each: bool = False,
    scratch: Path | None = None,
) -> Checkpoint:
    """Open a version of a chain, computed from the full version before it, or else from the `base` of the first one.

    With `verifies_each`, reading a tensor compares the checksums of all states between. `scratch` is that of
    `read_patches`. See `open_checkpoint`.
    """
    line = chain.line(number)
    if not line[0].is_full and base is not None:
        state = state_digest(base.tensors.values())
        if None not in (state, line[0].base_state) and state != line[0].base_state:
            raise other_base(base.location, line[0].base, line[0].base_state, state)
        return follow(base, chain, line, verifies_each=verifies_each)
    if not line[0].is_full:
        problem = f"version {line[0].number} is a delta of version {line[0].base}, which the chain does not have"
        hint = "apply it to a folder that has the base, or publish a full version: reshard delta publish NEW --full"
        raise SourceError(str(chain), problem, hint, code="source.no-full-version")
    full = open_full(chain, line[0], options)
    return follow(full, chain, line, verifies_each=verifies_each, scratch=scratch)


def open_full(chain: Chain, version: Version, options: OpenOptions | None = None) -> Checkpoint:
    """Open a full version, with the digests in its headers if it has them, and compare its state with them."""
    opened = with_header_digests(open_folder(VersionFolder(chain.folder, version.folder), options or OpenOptions()))
    if not opened.record.dropped:
        check_state(opened.tensors.values(), version, str(chain))
    auxiliary = tuple(replace(item, digest=(version.files or {}).get(item.path)) for item in opened.auxiliary)
    return replace(opened, auxiliary=auxiliary)


def follow(
    base: Checkpoint,
    chain: Chain,
    line: Sequence[Version],
    *,
    verifies_each: bool = False,
    scratch: Path | None = None,
) -> Checkpoint:
    """Return the state that consecutive deltas of a chain make of a base; the first version may be the base itself."""
    deltas, number = [version for version in line if not version.is_full], line[-1].number
    patches: dict[str, list[Patch]] = {}
    gone, fqn_of = set(base.record.dropped), base.shape.fqn_of
    entries = (entry for shard in base.record.shards for entry in shard.header.tensors if entry.name in gone)
    dropped = {fqn_of(entry.name): replace(entry, name=fqn_of(entry.name)) for entry in entries}
    for version in deltas:
        for name, patch in read_patches(chain.folder, version, scratch).items():
            fqn = fqn_of(name)
            if fqn not in base.tensors and fqn not in dropped:
                hint = "the delta is of another model"
                raise SourceError(patch.where, "the base has no such tensor", hint, code=BAD_DELTA)
            patches.setdefault(fqn, []).append(patch)
    tensors: dict[str, TensorAt] = {
        name: patched(tensor, patches.get(name, ()), f"at version {number}", verifies_each=verifies_each)
        for name, tensor in base.tensors.items()
    }
    if deltas and not dropped:  # a state is of all tensors
        check_state(tensors.values(), deltas[-1], str(chain))
    return replace(
        base,
        tensors=tensors,
        auxiliary=auxiliary_at(base, chain, deltas),
        record=record_anew((*tensors.values(), *dropped.values()), tuple(dropped)),
        source=Source(kind="delta", location=f"{chain.folder.location}@{number}"),
    )


def other_base(where: str, number: int | None, expected: str | None, state: str | None) -> SourceError:
    """Return the error for a checkpoint that is not the version that it is taken for."""
    problem = f"is not version {number} of the chain: expected the state {expected}, found {state or 'other tensors'}"
    return SourceError(where, problem, "name a copy of that version", code="source.other-base")


def check_state(tensors: Iterable[TensorAt], version: Version, where: str) -> str | None:
    """Compare the digest of a state, if it is recorded and all digests are known, and return it."""
    state = state_digest(tensors)
    if None not in (state, version.state) and state != version.state:
        problem = f"version {version.number}: expected the state {version.state}, found {state}"
        hint = "a header or an index is damaged, or versions of two runs are mixed; copy the chain again"
        raise SourceError(where, problem, hint, code="source.broken-chain")
    return state


def check_files(opened: Checkpoint, version: Version, where: str) -> None:
    """Refuse a version of which auxiliary files that its index lists are lost."""
    lost = sorted((version.files or {}).keys() - {item.path for item in opened.auxiliary})
    if lost:
        problem = f"version {version.number} has {some(lost)}, which the chain does not have"
        raise SourceError(where, problem, "copy the chain again, or publish a version", code="source.broken-chain")


def with_header_digests(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of a Hugging Face folder with the digests that its headers have, as we write them."""
    tensors = dict(checkpoint.tensors)
    for shard in checkpoint.record.shards:
        header = shard.header
        digests = split_digests(header.metadata.get(DIGESTS_KEY, ""))
        if digests is not None and len(digests) == len(header.tensors):
            for name, digest in zip(header.names, digests, strict=True):
                fqn = checkpoint.shape.fqn_of(name)
                if fqn in tensors:
                    tensors[fqn] = replace(tensors[fqn], blake3=bytes.fromhex(digest))
    return replace(checkpoint, tensors=tensors)


def with_all_digests(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the digests of all tensors; those that have none are read."""
    unknown = [tensor for tensor in checkpoint.tensors.values() if tensor.blake3 is None]
    digests = zip(unknown, map(bytes.fromhex, hash_tensors(unknown)), strict=True)
    hashed = {tensor.name: replace(tensor, blake3=digest) for tensor, digest in digests}
    return replace(checkpoint, tensors={**checkpoint.tensors, **hashed})


def auxiliary_at(base: Checkpoint, chain: Chain, versions: Sequence[Version]) -> tuple[AuxiliaryAt, ...]:
    """Return the auxiliary files of the last of these: those of the base, or of the last version that has others.

    Versions of slime's list none, and have those of the version before, but for digests of its files.
    """
    files = next((version.files for version in reversed(versions) if version.files is not None), None)
    if files is None:
        return tuple(item for item in base.auxiliary if not item.path.startswith(SOURCE_FILES))
    items = {item.path: item for item in base.auxiliary if item.path in files}
    for path, digest in files.items():
        if path not in items or items[path].digest != digest:
            file = chain.find_file(path, versions[-1].number)
            if file is not None:  # otherwise, of a base that is not in the chain
                items[path] = AuxiliaryAt(path=path, file=file, digest=digest)
    return tuple(items.values())


@dataclass(frozen=True, slots=True)
class VersionFolder:
    """The folder of a version, in the store of its chain."""

    chain: Folder
    name: str

    def __str__(self) -> str:
        return self.location

    @property
    def kind(self) -> str:
        return "delta"

    @property
    def location(self) -> str:
        return f"{self.chain.location.rstrip('/')}/{self.name}"

    @property
    def revision(self) -> None:
        return None

    def names(self) -> tuple[str, ...]:
        if isinstance(self.chain, LocalFolder):
            return LocalFolder(self.chain.path / self.name).names()
        prefix = f"{self.name}/"
        names = (name.removeprefix(prefix) for name in self.chain.names() if name.startswith(prefix))
        return tuple(name for name in names if not is_working_name(name))  # of a publisher that was killed at the end

    def file(self, name: str) -> InputFile:
        return self.chain.file(f"{self.name}/{name}")
