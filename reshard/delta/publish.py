"""publish: the next version of a chain, a delta where only values changed, and a full version otherwise.

A version has a folder or prefix of its own, and exists once its index does. Tensors whose digests are known, on both
sides, are compared without reading them; the others are read once, on both sides, and hashed. Compressed differences
are spooled to disk, since a header needs their sizes, and comes first. Memory: a few MiB for each thread.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from manifests.digest import digest_bytes
from manifests.errors import Parameter, SourceError, check_choice
from manifests.index import INDEX_NAME, MAX_SHARD_NBYTES, split_by_size
from manifests.paths import root_shard_path
from manifests.safetensors import layout_tensors
from manifests.versions import LOCK_NAME, encode_version, folder_of, metadata_of
from reshard.copy.destination import FolderTarget, Target, check_apart, check_unchanged, copy_files, open_target
from reshard.copy.engine import WriteOptions
from reshard.copy.parallelism import Parallelism
from reshard.copy.runs import Progress, counting
from reshard.delta.copies import check_copy
from reshard.delta.differences import Difference, compare_states
from reshard.formats.auxiliary import with_source_files
from reshard.formats.delta.chain import Chain, Version, open_chain, open_versions, state_digest
from reshard.formats.delta.codec import check_packages
from reshard.formats.delta.read import check_files, check_state, open_version, other_base, with_header_digests
from reshard.formats.huggingface.write import with_config_for
from reshard.formats.open import open_source
from reshard.plans.pack_plan import OutputShard, lay_out_root, with_header
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.comparison import are_of_one_kind
from reshard.tensors.source_index import new_header_text
from reshard.transforms.conversion import ExportDtype, cast_checkpoint
from reshard.transforms.quantize import forget_source
from stores.address import is_url
from stores.base import read_file_header, read_whole
from stores.bundles import TensorAt, tensors_in
from stores.folders.lock import locking
from stores.folders.publish import TMPDIR, temporary_folder, writing_to
from stores.local import LocalFolder
from stores.open import Address, open_store
from stores.versions import check_chain, files_of_version

_SPOOL_NAME = ".publish.spool"
_LEAST_NBYTES = MAX_SHARD_NBYTES // 100_000  # that a tensor counts as: the header of a shard has a limit, too


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishResult:
    """The version that was published, or, if nothing had changed, the newest one.

    Units: `nbytes` of the version's weights in the chain, `changed_nbytes` that differ from the base, in bytes.
    """

    location: str
    number: int
    base: int | None
    state: str | None
    num_tensors: int
    num_changed: int
    changed_nbytes: int
    nbytes: int
    is_new: bool = True

    @property
    def is_full(self) -> bool:
        return self.base is None


def publish_delta(
    source: str | Path,
    chain: str | Path,
    *,
    base: str | Path | None = None,
    dtype: ExportDtype = "source",
    full: bool = False,
    parallelism: Parallelism | None = None,
    progress: Progress | None = None,
) -> PublishResult:
    """Publish the weights of a checkpoint as the next version of a chain in a folder or a bucket.

    The first version is a full one, and so is one whose tensors have other names, dtypes or shapes than the one
    before, or any with `full`. The others are deltas. `source` is anything that `pack` takes; `dtype` casts it as
    `export` does. `base` is a copy of the newest version, which is compared instead of reading it from the chain; for a
    chain without versions it is version 0, which receivers have and the chain does not. Nothing is published if
    nothing has changed.

    Units: bytes; progress is called with bytes done and bytes in total.
    Raises:
        SourceError, ModelError, ShardError, ManifestError: `source`, `base` or the chain is damaged, or `base` is
            another state than the newest version.
        OutputError: the version cannot be written.
        LaunchError: another process publishes to this chain.
        StoreError: zstandard is not installed.

    Example:
        >>> done = reshard.publish_delta("model", "chain")
        >>> done.number, done.is_full, done.num_tensors
        (1, True, 39)
    """
    check_choice(Parameter("dtype"), dtype, get_args(ExportDtype))
    check_packages()
    opened = open_source(str(source))
    check_apart(_address(chain), opened, may_replace=False, option="chain")
    new = with_config_for(cast_checkpoint(opened, dtype), dtype)
    with _publishing(_address(chain)) as (spool, check_lock):
        opened_chain = open_chain(chain)
        old = None if full and base is None else _old_state(opened_chain, base)
        number = opened_chain.numbers[-1] + 1 if opened_chain.numbers else 1
        publisher = _Publisher(_address(chain), number, parallelism or Parallelism(), check_lock)
        if full or old is None or not _are_alike(old, new):
            return publisher.write_full(new, progress)
        return publisher.write_delta(old, new, opened_chain, spool, progress)


def fold_delta(
    chain: str | Path,
    *,
    version: int | None = None,
    out: str | Path | None = None,
    parallelism: Parallelism | None = None,
    progress: Progress | None = None,
) -> PublishResult:
    """Write a version of a chain as a full one: as the next version of the chain, or as the first of another, `out`.

    In the chain, this rolls back to an older `version`, and lets `prune_delta` remove the versions before; to `out`,
    it forks the chain, and the version keeps its number.

    Units: bytes; progress is called with bytes done and bytes in total.
    Raises:
        SourceError: there is no such version, or the chain is damaged; `out` has versions.
        OutputError: it cannot be written.

    Example:
        >>> reshard.publish_delta("model", "chain").number, reshard.fold_delta("chain").number
        (1, 2)
    """
    check_packages()
    opened = open_versions(chain)
    folded = opened.version(opened.numbers[-1] if version is None else version)
    state = open_version(opened, folded.number)
    check_files(state, folded, str(opened))
    place = _address(chain if out is None else out)
    with _publishing(place) as (_, check_lock):
        there = open_chain(place)
        if out is not None and there.numbers:
            problem = f"has versions already, the newest of which is {there.numbers[-1]}"
            raise SourceError(str(place), problem, "fork to a new folder", code="source.chain-exists")
        number = there.numbers[-1] + 1 if there.numbers else folded.number
        publisher = _Publisher(place, number, parallelism or Parallelism(), check_lock)
        return publisher.write_full(state, progress, folded)


@dataclass(frozen=True, slots=True)
class _Publisher:
    """Writes one version."""

    chain: Address
    number: int
    parallelism: Parallelism
    check_lock: Callable[[], None]  # right before the index is written

    @property
    def place(self) -> Address:
        name = folder_of(self.number)
        return f"{self.chain.rstrip('/')}/{name}" if isinstance(self.chain, str) else self.chain / name

    def write_full(self, new: Checkpoint, progress: Progress | None, folded: Version | None = None) -> PublishResult:
        """Write a full version; that of a `folded` one must have its state."""
        shards = lay_out_root(new.tensors.values())
        total = sum(tensor.nbytes for tensor in new.tensors.values())
        auxiliary = _auxiliary(new)
        with self._target(shards, auxiliary) as target:
            files = {file.path: file.digest for file in copy_files(auxiliary, target)}
            options = WriteOptions(parallelism=self.parallelism, progress=counting(progress, total))
            written = target.write_shards(shards, options)
            root = LocalFolder(target.folder) if isinstance(target, FolderTarget) else open_store(str(self.place))
            tensors: list[TensorAt] = []
            for shard in written:
                header = read_file_header(file := root.file(shard.path))
                tensors += tensors_in(file, header, header.digest_table(str(file)))
            state = check_state(tensors, folded, new.location) if folded else state_digest(tensors)
            check_unchanged(shards, auxiliary)
            metadata = {"total_size": total, **metadata_of(self.number, state, is_full=True)}
            self.check_lock()
            _commit(target, metadata, files, shards)
        return PublishResult(
            location=str(self.place),
            number=self.number,
            base=None,
            state=state,
            num_tensors=len(tensors),
            num_changed=len(tensors),
            changed_nbytes=total,
            nbytes=sum(shard.nbytes for shard in shards),
        )

    def write_delta(
        self, old: Checkpoint, new: Checkpoint, chain: Chain, spool: Path, progress: Progress | None
    ) -> PublishResult:
        pairs = [(old.tensors[name], tensor) for name, tensor in new.tensors.items()]
        unread = [(a, b) for a, b in pairs if a.blake3 is None or b.blake3 is None or a.blake3 != b.blake3]
        counter = counting(progress, sum(2 * tensor.nbytes for _, tensor in unread))
        writing = partial(writing_to, *(TMPDIR if is_url(self.chain) else (str(self.chain),)))
        differences = compare_states(unread, spool, writing, self.parallelism, counter)
        before = [differences[a.name].old if a.name in differences else a for a, _ in pairs]
        after = [differences[b.name].new if b.name in differences else b for _, b in pairs]
        base_state, state = state_digest(before), state_digest(after)
        head = chain.version(chain.numbers[-1]) if chain.numbers else None
        if head is not None and None not in (head.state, base_state) and head.state != base_state:
            raise other_base(old.location, head.number, head.state, base_state)
        auxiliary = _auxiliary(new)
        digests = {item.path: item.digest or digest_bytes(read_whole(item.file)) for item in auxiliary}
        present = {item.path: item.digest or digest_bytes(read_whole(item.file)) for item in _auxiliary(old)}
        if head is not None and (files := chain.files(head.number)) is not None:
            present = dict(present.items() & files.items())  # a copy may have others
        changed = [difference for difference in differences.values() if difference.stored is not None]
        result = PublishResult(
            location=str(self.place),
            number=self.number,
            base=self.number - 1,
            state=state,
            num_tensors=len(pairs),
            num_changed=len(changed),
            changed_nbytes=sum(difference.num_changed for difference in changed),
            nbytes=0,
        )
        if not changed and digests == present and head is not None:
            return replace(
                result, location=str(chain), number=head.number, base=head.base, state=head.state, is_new=False
            )
        shards = _delta_shards(changed)
        copied = [item for item in auxiliary if present.get(item.path) != digests[item.path]]
        with self._target(shards, copied) as target:
            copy_files(copied, target)
            target.write_shards(shards, WriteOptions(parallelism=self.parallelism))
            origins = [OutputShard(path="", origins=tuple(b for _, b in unread), header_nbytes=0)]
            check_unchanged(origins, auxiliary)
            metadata = metadata_of(self.number, state, base_state, is_full=False)
            self.check_lock()
            _commit(target, metadata, digests, shards)
        return replace(result, nbytes=sum(shard.nbytes for shard in shards))

    def _target(
        self, shards: Sequence[OutputShard], auxiliary: Sequence[AuxiliaryAt]
    ) -> AbstractContextManager[Target]:
        wanted = {INDEX_NAME, *(shard.path for shard in shards), *(item.path for item in auxiliary)}
        # In a bucket, `force` takes the place of a publisher that was killed; a version that exists is never replaced.
        force = is_url(self.place)
        return open_target(
            self.place,
            shards,
            force=force,
            find_owned=files_of_version,
            wanted=wanted,
            last=INDEX_NAME,
            is_reserved=True,
        )


def _delta_shards(differences: Sequence[Difference]) -> list[OutputShard]:
    digests = {difference.new.name: difference.new.digest or "" for difference in differences}
    stored = [difference.stored for difference in differences if difference.stored is not None]
    runs = split_by_size(stored, lambda tensor: max(tensor.nbytes, _LEAST_NBYTES), MAX_SHARD_NBYTES)
    shards = []
    for at, run in enumerate(runs):
        entries = layout_tensors((tensor.name, tensor.dtype, tensor.shape) for tensor in run)
        text = new_header_text(entries, {tensor.name: digests[tensor.name] for tensor in run})
        shards.append(with_header(root_shard_path(at, len(runs)), run, text, entries))
    return shards


def _commit(
    target: Target, metadata: Mapping[str, object], files: Mapping[str, str], shards: Iterable[OutputShard]
) -> None:
    """Write the index, with which the version exists."""
    weight_map = {origin.name: shard.path for shard in shards for origin in shard.origins}
    target.commit(INDEX_NAME, encode_version(metadata, files, weight_map))


def open_base(base: str | Path) -> Checkpoint:
    """Open a copy of a version; the digests that its headers have are used."""
    opened = open_source(str(base))
    return with_header_digests(opened) if opened.manifest is None else opened  # whose headers are of its source


def _old_state(chain: Chain, base: str | Path | None) -> Checkpoint | None:
    """Return the newest state of a chain, read from the chain or from a copy of it; None if the next one is full."""
    copy = None if base is None else open_base(base)
    if not chain.numbers:
        return copy
    head = chain.numbers[-1]
    if copy is not None and not chain.line(head)[0].is_full:
        check_copy(copy, chain, head)
        return copy
    newest = open_version(chain, head)
    if copy is None:
        return newest
    if not _are_alike(newest, copy):
        raise other_base(copy.location, head, chain.version(head).state, None)
    if chain.version(head).state is None:  # nothing tells whether the copy is that version
        return newest
    tensors = {name: replace(copy.tensors[name], blake3=tensor.blake3) for name, tensor in newest.tensors.items()}
    return replace(newest, tensors=tensors)


def _are_alike(old: Checkpoint, new: Checkpoint) -> bool:
    """Return whether both have tensors of the same names, dtypes and shapes."""
    return old.tensors.keys() == new.tensors.keys() and all(
        are_of_one_kind(tensor, new.tensors[name]) for name, tensor in old.tensors.items()
    )


def _auxiliary(checkpoint: Checkpoint) -> list[AuxiliaryAt]:
    """Return the files that receivers get: none that describe the source's files, or how they were trained."""
    return with_source_files(forget_source(checkpoint).auxiliary, is_same=False)


def _address(chain: str | Path) -> Address:
    return chain if is_url(chain) else Path(chain)


@contextmanager
def _publishing(chain: Address) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield a folder for the spool, and a check that no other process has taken over the chain in a folder."""
    check_chain(open_store(chain) if isinstance(chain, str) else LocalFolder(chain), str(chain))
    if isinstance(chain, str):
        with temporary_folder("reshard-publish-") as folder:
            yield folder, lambda: None
        return
    with writing_to(str(chain)):
        chain.mkdir(parents=True, exist_ok=True)
    with locking(chain / LOCK_NAME, str(chain), "reshard delta publish") as check_lock:
        spool = chain / _SPOOL_NAME
        shutil.rmtree(spool, ignore_errors=True)
        with writing_to(str(chain)):
            spool.mkdir()
        try:
            yield spool, check_lock
        finally:
            shutil.rmtree(spool, ignore_errors=True)
