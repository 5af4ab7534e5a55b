"""Where an output goes: a folder on this machine, or a prefix of a bucket. Both appear whole or not at all."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from manifests.digest import digest_bytes
from manifests.errors import OutputError, UsageError
from manifests.safetensors import parse_header
from manifests.schema import AuxiliaryFile
from manifests.store import write_file
from reshard.copy.engine import WriteOptions, WrittenShard, hash_tensors, write_in_order, write_shards
from reshard.copy.journal import Journal
from reshard.plans.pack_plan import OutputShard
from reshard.tensors.checkpoint import Checkpoint, TensorAt
from stores.address import is_inside, is_url, place_of
from stores.base import Blocks, InputFile
from stores.local import LocalFile
from stores.manifest_file import Address
from stores.object_output import ObjectTarget

__all__ = ["NUM_UPLOADS", "BucketTarget", "FolderTarget", "Target", "check_apart", "read_again"]

_BESIDE = "choose a folder beside it"
NUM_UPLOADS = 2  # shards under way at a time: one is hashed while another is sent

Progress = Callable[[int], object]


class Target(Protocol):
    """An output under construction. Of its files, the one that `commit` writes is the last."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file."""
        ...

    def copy(self, name: str, file: InputFile, digest: str | None = None) -> AuxiliaryFile:
        """Copy a file of any length, a block at a time, and check its digest when one is given.

        Raises:
            InputError: it cannot be read, or is not what the digest says.
        """
        ...

    def write_shards(self, shards: Sequence[OutputShard], options: WriteOptions) -> tuple[WrittenShard, ...]:
        """Write shards, given in return with the paths that they have now.

        Raises:
            InputError: there is no room for them, as far as can be known, or as `engine.write_shards`.
        """
        ...

    def commit(self, name: str, data: bytes) -> None: ...


def check_apart(out: Address, checkpoint: Checkpoint, *, may_replace: bool) -> None:
    """Make sure that an output leaves what it is made of as it is, however both are named.

    One that `may_replace` a manifest may be written over that very one: it holds the same bytes.

    Raises:
        InputError: it would be in the place of its source.
        UsageError: it would lie inside its source or around it.
    """
    place = place_of(out)
    for number, source in enumerate(_read_from(checkpoint)):
        origin = place_of(source)
        if is_inside(place, origin):
            raise UsageError(
                "--out",
                f"{out} is inside {source}, which would have other files then",
                _BESIDE,
                code="output.overlaps-source",
            )
        if is_inside(origin, place):
            raise UsageError(
                "--out", f"{source}, which is read, is inside {out}", _BESIDE, code="output.overlaps-source"
            )
        if place == origin and not (may_replace and number == 0):
            raise OutputError(
                str(out),
                "is what is read; --force does not replace it",
                "choose another --out",
                code="output.overlaps-source",
            )


def _read_from(checkpoint: Checkpoint) -> Iterator[str]:
    """Give a checkpoint's folder, then that of original files, and where links take those."""
    yield checkpoint.location
    if checkpoint.originals is not None:
        if checkpoint.manifest is not None:
            yield checkpoint.originals.location
        for file in checkpoint.originals.files.values():
            if isinstance(file, LocalFile):
                yield str(file.path.resolve())


@dataclass(frozen=True, slots=True)
class FolderTarget:
    """A folder that appears when its `publishing` block ends; with a journal, what is written can be gone on with."""

    folder: Path
    journal: Journal | None = None

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
        _check_space(shards, self.folder)
        return write_shards(shards, self.folder, replace(options, journal=self.journal))

    def commit(self, name: str, data: bytes) -> None:
        self.put(name, data)  # the folder loses its journal later, as it gets its name


@dataclass(frozen=True, slots=True)
class BucketTarget:
    """Uploads shards from their first byte to their last, each with its header in front.

    Digests that a header is to hold and nobody knows are computed before: those tensors are read twice, and
    must be the same both times. Memory: `NUM_UPLOADS` uploads (see `stores.object_output`), and twice as many
    readers of the source (see `stores.ranges`).
    """

    objects: ObjectTarget

    def put(self, name: str, data: bytes) -> None:
        self.objects.put(name, data)

    def copy(self, name: str, file: InputFile, digest: str | None = None) -> AuxiliaryFile:
        blocks = Blocks(file, digest)
        self.objects.copy(name, blocks)
        return AuxiliaryFile(path=name, nbytes=blocks.nbytes, digest=blocks.digest)

    def write_shards(self, shards: Sequence[OutputShard], options: WriteOptions) -> tuple[WrittenShard, ...]:
        stop = threading.Event()

        def progress(nbytes: int) -> None:
            if stop.is_set():
                raise CancelledError
            options.progress(nbytes)

        with ThreadPoolExecutor(NUM_UPLOADS, thread_name_prefix="upload") as pool:
            try:
                jobs = [pool.submit(self._upload, shard, progress) for shard in shards]
                for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    job.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return tuple(job.result() for job in jobs)

    def commit(self, name: str, data: bytes) -> None:
        self.objects.commit(data, name)

    def _upload(self, shard: OutputShard, progress: Progress) -> WrittenShard:
        if (header := self._completed(shard)) is not None:
            progress(sum(tensor.nbytes for tensor in (*_hashed_first(shard), *shard.origins)))
            return WrittenShard(path=self.objects.place(shard.path), nbytes=shard.nbytes, digest=digest_bytes(header))
        unknown = _hashed_first(shard)
        found = dict(zip((tensor.name for tensor in unknown), hash_tensors(unknown, progress), strict=True))
        shard = replace(
            shard,
            path=self.objects.place(shard.path),
            origins=tuple(replace(origin, digest=found.get(origin.name, origin.digest)) for origin in shard.origins),
        )
        digests = {origin.name: origin.digest for origin in shard.origins if origin.digest}
        header = shard.header_with(digests)
        writer = self.objects.writer(shard.path, shard.nbytes, header)
        write_in_order(shard, writer, progress)
        writer.finish()
        return WrittenShard(path=shard.path, nbytes=shard.nbytes, digest=digest_bytes(header))

    def _completed(self, shard: OutputShard) -> bytes | None:
        """Return the header of a shard that an earlier run completed, if it is this one's."""
        path = self.objects.place(shard.path)
        header = self.objects.completed(path, shard.nbytes, shard.header_nbytes)
        if header is None or not shard.with_digests:
            return header if header == shard.header else None
        found = parse_header(header[8:], data_nbytes=shard.nbytes - len(header), where=path).digests(path)
        known = {origin.name: origin.digest for origin in shard.origins if origin.digest}
        is_same = known.items() <= found.items() and shard.header_with(found) == header
        return header if is_same else None


def read_again(shards: Iterable[OutputShard], out: Address) -> list[TensorAt]:
    """Give the tensors that are read twice on their way to `out`."""
    return [tensor for shard in shards for tensor in _hashed_first(shard)] if is_url(out) else []


def _hashed_first(shard: OutputShard) -> list[TensorAt]:
    """Give the tensors that are hashed before a shard is uploaded: their digests are to stand in its header."""
    return [origin for origin in shard.origins if origin.digest is None] if shard.with_digests else []


def _check_space(shards: Sequence[OutputShard], folder: Path) -> None:
    """Refuse to begin what the disk cannot hold; what an interrupted run left there is room, too."""
    needed = sum(shard.nbytes for shard in shards)
    there = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + there
    if needed > free:
        raise OutputError(
            str(folder.parent),
            f"{needed} bytes needed, {free} free",
            "choose another disk for --out",
            code="output.disk-full",
        )
