"""Where an output is written: a folder here, a bucket in `reshard.copy.bucket`. Both appear atomically."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from manifests.errors import OutputError, Parameter, SourceError, UsageError
from manifests.schema import AuxiliaryFile
from manifests.store import write_file
from reshard.copy.engine import WriteOptions, WrittenShard, is_remote, write_shards
from reshard.copy.journal import Journal, is_working_name
from reshard.copy.parallelism import Parallelism, Uploads
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import AuxiliaryAt, Checkpoint
from reshard.tensors.read_together import read_together
from reshard.tensors.slices import pieces_of
from stores.address import is_inside, is_url, place_of
from stores.base import Blocks, InputFile
from stores.bundles import TensorAt
from stores.local import LocalFile
from stores.open import Address
from stores.prefetch import STREAM_NBYTES, RemoteFile

_MANY_STREAMS = 128
_LEAST_STREAM_NBYTES = 2 << 20


class Target(Protocol):
    """An output under construction, to which `commit` writes the last file."""

    def place(self, path: str) -> str:
        """Return the path at which a shard is written."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file."""
        ...

    def copy(self, name: str, file: InputFile, digest: str | None = None) -> AuxiliaryFile:
        """Copy a file of any length, a block at a time, and verify its digest if there is one.

        Raises:
            InputError: it cannot be read, or does not match its digest.
        """
        ...

    def write_shards(self, shards: Sequence[OutputShard], options: WriteOptions) -> tuple[WrittenShard, ...]:
        """Write shards, and return them with the paths that they have now.

        Raises:
            OutputError: there is not enough disk space.
            InputError: as `engine.write_shards`.
        """
        ...

    def written(self, names: Collection[str]) -> dict[str, tuple[int, str]]:
        """Return the size of each of these files, which are complete, and its ETag, "" in a folder."""
        ...

    def commit(self, name: str, data: bytes) -> None:
        """Write the file that makes the output valid."""
        ...


def check_apart(out: Address, checkpoint: Checkpoint, *, may_replace: bool) -> None:
    """Refuse an output that overlaps what it is read from, whichever names lead there.

    With `may_replace`, a manifest may be replaced by its own repack, which has the same bytes.

    Raises:
        OutputError: it is where its source is.
        UsageError: it is inside its source, or its source is inside it.
    """
    place = place_of(out)
    for number, source in enumerate(_locations(checkpoint)):
        origin = place_of(source)
        if is_inside(place, origin) or is_inside(origin, place):
            inner, outer = (out, source) if is_inside(place, origin) else (source, out)
            problem = f"overlaps the source: {inner} is inside {outer}"
            raise UsageError(Parameter("out"), problem, "choose a folder beside it", code="output.overlaps-source")
        if place == origin and not (may_replace and number == 0):
            problem = f"is the source itself, which {Parameter('force', True)} does not replace"
            raise OutputError(str(out), problem, f"choose another {Parameter('out')}", code="output.overlaps-source")


def check_space(needed_nbytes: int, free_nbytes: int, folder: Path) -> None:
    """Refuse to start writing below `folder` what the disk has no space for.

    Raises:
        OutputError: the disk is full.
    """
    if needed_nbytes > free_nbytes:
        problem = f"the disk has {free_nbytes} bytes free, expected at least {needed_nbytes}"
        raise OutputError(
            str(folder.parent), problem, f"choose another disk for {Parameter('out')}", code="output.disk-full"
        )


def _locations(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a checkpoint's folder, that of its original files, and the targets of links among those."""
    yield checkpoint.location
    if checkpoint.originals is not None:
        if checkpoint.manifest is not None:
            yield checkpoint.originals.location
        for file in checkpoint.originals.files.values():
            if isinstance(file, LocalFile):
                yield str(file.path.resolve())


@dataclass(frozen=True, slots=True)
class FolderTarget:
    """A folder that appears when its `publishing` block ends; with a journal, an interrupted run can be resumed."""

    folder: Path
    journal: Journal | None = None

    def place(self, path: str) -> str:
        return path

    def put(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)

    def copy(self, name: str, file: InputFile, digest: str | None = None) -> AuxiliaryFile:
        path, blocks = self.folder / name, Blocks(file, digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, blocks)
        return AuxiliaryFile(path=name, nbytes=blocks.nbytes, digest=blocks.digest)

    def write_shards(self, shards: Sequence[OutputShard], options: WriteOptions) -> tuple[WrittenShard, ...]:
        # What an interrupted run left here will be overwritten.
        reused = sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())
        free = shutil.disk_usage(self.folder).free + reused
        check_space(sum(shard.nbytes for shard in shards), free, self.folder)
        return write_shards(shards, self.folder, replace(options, journal=self.journal))

    def written(self, names: Collection[str]) -> dict[str, tuple[int, str]]:
        return {name: ((self.folder / name).stat().st_size, "") for name in names}

    def commit(self, name: str, data: bytes) -> None:
        self.put(name, data)  # the folder loses its journal later, as it gets its name


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadPlan:
    """How shards are uploaded: how many at a time, and the memory for reading a remote source meanwhile.

    A shard's header comes first, and has its digests. Shards that are `kept` stay in memory from the reading that
    computes these until they are sent, while the next `num_readers` are read, half of them if not all fit at a time;
    otherwise, tensors without a known digest are read twice.
    """

    uploads: Uploads
    reading: Parallelism
    num_readers: int
    is_kept: bool = False

    @property
    def stream_nbytes(self) -> int:
        """The memory for each request: shorter ones where a few shards are read whole, each as fast as can be."""
        share = self.reading.memory_nbytes // _MANY_STREAMS
        return min(STREAM_NBYTES, max(_LEAST_STREAM_NBYTES, share)) if self.is_kept else STREAM_NBYTES

    @classmethod
    def of(cls, shards: Sequence[OutputShard], parallelism: Parallelism) -> UploadPlan:
        sizes = [shard.nbytes for shard in shards]
        if _can_be_kept(shards) and (kept := parallelism.uploads_of_kept(sizes)):
            is_one_round = kept.num_objects == len(shards)
            num_readers = kept.num_objects if is_one_round else (kept.num_objects + 1) // 2
            reading = parallelism.within(num_readers * max(sizes))
            return cls(uploads=kept, reading=reading, num_readers=num_readers, is_kept=True)
        if is_remote(origin for shard in shards for origin in shard.origins):
            parallelism = parallelism.within(parallelism.memory_nbytes // 2)
        uploads = parallelism.uploads_of(sizes)
        return cls(uploads=uploads, reading=parallelism, num_readers=uploads.num_objects)

    def read_before(self, shard: OutputShard) -> list[TensorAt]:
        """Return the tensors of a shard that are read twice."""
        return [] if self.is_kept else without_digest(shard)


def read_twice(shards: Sequence[OutputShard], out: Address, parallelism: Parallelism) -> list[TensorAt]:
    """Return the tensors that are read twice when `shards` are written to `out`."""
    if not is_url(out):
        return []
    plan = UploadPlan.of(shards, parallelism)
    return [tensor for shard in shards for tensor in plan.read_before(shard)]


def _can_be_kept(shards: Sequence[OutputShard]) -> bool:
    """Return whether shards must be hashed before they are sent, and all of them are fetched in planned requests."""
    origins = (origin for shard in shards for origin in shard.origins)
    files = {type(piece.file): piece.file for origin in origins for piece in pieces_of(origin)}
    return any(map(without_digest, shards)) and all(isinstance(file, RemoteFile) for file in files.values())


def without_digest(shard: OutputShard) -> list[TensorAt]:
    """Return the tensors to hash before a shard is uploaded, since its header comes first and has their digests."""
    return [origin for origin in shard.origins if origin.blake3 is None] if shard.with_digests else []


def copy_files(files: Sequence[AuxiliaryAt], target: Target) -> tuple[AuxiliaryFile, ...]:
    """Copy auxiliary files byte for byte, verifying known digests.

    Raises:
        SourceError: one has a name that is reserved for files under construction.
        InputError: one cannot be read, or does not match its digest.
    """
    for item in files:
        if is_working_name(item.path):  # of a manifest; for other sources it was checked before
            problem = "this name is reserved for files under construction"
            raise SourceError(str(item.file), problem, "leave the file out", code="source.reserved-name")
    read = read_together([item.file for item in files])
    return tuple(target.copy(item.path, file, item.digest) for item, file in zip(files, read, strict=True))
