"""Shards as runs write them: tensors or slices, or compressed differences, with the digests of states in the header.

# Note [Tensors that are stored once]
Frozen modules, and experts that no token reached, have the same bytes in one checkpoint after the other. Shards are
divided so that such tensors are apart from others, and one whose tensors all have the digests that they had is a hard
link to the file in the checkpoint before: the bytes are on disk once. Each checkpoint stays a whole folder for every
reader, and pruning one removes no byte of another, whoever prunes (docs/adr/0041). Where a file system has no links,
or the file is gone, the shard is written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from manifests.digest import Hasher, digest_bytes
from manifests.errors import CheckpointError, InputError, system_errors
from manifests.index import MOST_READ_HEADER_NBYTES, is_indexed
from manifests.safetensors import encode_header, header_template, layout_tensors
from manifests.schema import WEIGHTS, Holds, Shard
from manifests.slices import slice_metadata
from manifests.store import open_shard, sync_folder
from manifests.versions import LEVEL
from runner.checkpoint.state import Held
from runner.tensors.local_shard import STORED_DTYPES, Piece, bytes_of
from stores.direct_io import SequentialFile
from stores.open import open_manifest

logger = logging.getLogger(__name__)
PART_NBYTES = 4 << 20  # hashed or written at a time: a tensor may have many GiB, and a disk may be slow
NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
_SYNC_NBYTES = 1 << 30  # fsync after so many bytes, so that the last fsync takes no longer than the others


def write_shard(
    pieces: Sequence[Piece],
    root: Path,
    path: str,
    holds: Holds = WEIGHTS,
    is_cancelled: Callable[[], bool] = lambda: False,
    digests: Mapping[str, str] | None = None,
) -> Generator[None, None, Shard]:
    """Write a shard of these tensors or slices, in this order, with their digests, part by part, and fsync it.

    `is_cancelled` is called before each part of them. Known `digests` are taken as they are.
    """
    header, computed, file = header_of(pieces, digests), dict[str, str](), root / path
    nbytes, unsynced_nbytes = shard_of(path, holds, header, pieces).nbytes, 0
    with _creating(file), closing(SequentialFile(file, nbytes, PART_NBYTES)) as stream:
        stream.append(header)
        for piece in pieces:
            data, hasher = bytes_of(piece.memory.detach().cpu().contiguous()), Hasher()
            for start in range(0, len(data), PART_NBYTES):
                check_not_cancelled(file, is_cancelled)
                part = data[start : start + PART_NBYTES]
                if digests is None:
                    hasher.update(part)
                stream.append(part)
                unsynced_nbytes += len(part)
                if unsynced_nbytes >= _SYNC_NBYTES:
                    stream.sync()
                    unsynced_nbytes = 0
                yield
            computed[piece.fqn] = hasher.hexdigest()
        if digests is None:
            header = header_of(pieces, computed)
        stream.finish(header)
    if len(header) > MOST_READ_HEADER_NBYTES and is_indexed(holds, path):
        what = "%s: the header takes %d bytes, and Hugging Face readers stop at 25 MB: pack with more stages"
        logger.warning(what, file, len(header))
    return shard_of(path, holds, header, pieces)


@contextmanager
def _creating(path: Path) -> Iterator[None]:
    with system_errors(path, "cannot be written", code="output.unwritable"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link to the file of another checkpoint, whose folder could not be synced
        yield
        sync_folder(path.parent)


def check_not_cancelled(path: Path, is_cancelled: Callable[[], bool]) -> None:
    if is_cancelled():
        problem = "was not finished, because another rank failed"
        raise CheckpointError(str(path), problem, code="checkpoint.unfinished")


def header_of(pieces: Sequence[Piece], digests: Mapping[str, str] | None) -> bytes:
    """Return the header of a shard; while digests are not known, one of the same length."""
    entries = layout_tensors((piece.fqn, NAMES[piece.memory.dtype], tuple(piece.memory.shape)) for piece in pieces)
    slices = {} if all(piece.is_whole for piece in pieces) else {piece.fqn: piece.part for piece in pieces}
    return header_template(entries, slice_metadata(slices) if slices else {}, digests)


def shard_of(path: str, holds: Holds, header: bytes, pieces: Sequence[Piece]) -> Shard:
    nbytes = len(header) + sum(piece.memory.nbytes for piece in pieces)
    return Shard(path=path, nbytes=nbytes, digest=digest_bytes(header), holds=holds)


def write_delta(
    path: Path,
    states: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    digests: Mapping[str, str],
    is_cancelled: Callable[[], bool],
) -> Generator[None, None, int]:
    """Write zstd of `old ^ new` of each tensor, given both by FQN on the CPU, fsync the file and return its bytes."""
    from zstandard import ZstdCompressor  # of an extra

    # The header comes first: room is left for that of the largest frames that there can be.
    most = layout_tensors((fqn, "U8", (_most_nbytes(new.nbytes),)) for fqn, (_, new) in states.items())
    sums = {fqn: digests[fqn] for fqn in states}
    room, sizes = len(encode_header(most, sums)), dict[str, int]()
    compressor = ZstdCompressor(level=LEVEL, write_checksum=True)
    with _creating(path), open(path, "wb") as stream:
        stream.seek(room)
        for fqn, (old, new) in states.items():
            frame, begin = compressor.compressobj(size=new.nbytes), stream.tell()
            before, after = (torch.frombuffer(bytes_of(tensor), dtype=torch.uint8) for tensor in (old, new))
            for first in range(0, new.nbytes, PART_NBYTES):
                check_not_cancelled(path, is_cancelled)
                difference = before[first : first + PART_NBYTES] ^ after[first : first + PART_NBYTES]
                stream.write(frame.compress(difference.numpy().data))
                yield
            stream.write(frame.flush())
            sizes[fqn] = stream.tell() - begin
        stream.seek(0)
        entries = layout_tensors((fqn, "U8", (size,)) for fqn, size in sizes.items())
        stream.write(encode_header(entries, sums, alignment=room))
        stream.flush()
        os.fsync(stream.fileno())
    return room + sum(sizes.values())


def _most_nbytes(nbytes: int) -> int:
    return nbytes + nbytes // 100 + 1024  # of a frame: above ZSTD_compressBound


Digests = Mapping[tuple[int, Holds], Mapping[str, str]]  # of tensors, in hex, by stage and kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """What a checkpoint has of some stages: `tensors` are the FQNs and digests of each shard, in its order.

    `paths` are the shards by digest, which their tensors' digests determine.
    """

    tensors: Mapping[tuple[int, Holds], Sequence[tuple[tuple[str, str], ...]]] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Path | None, stages: Collection[int]) -> Before:
        """Read the headers of a checkpoint; of one that cannot be read, nothing is known."""
        tensors, paths = dict[tuple[int, Holds], list[tuple[tuple[str, str], ...]]](), dict[str, Path]()
        if checkpoint is None:
            return cls()
        with suppress(InputError):
            for stage in open_manifest(checkpoint).manifest.stages:
                for shard in stage.shards if stage.index in stages else ():
                    digests = open_shard(checkpoint, shard).digests(shard.path)
                    tensors.setdefault((stage.index, shard.holds), []).append(tuple(digests.items()))
                    paths[shard.digest] = checkpoint / shard.path
        return cls(tensors=tensors, paths=paths)

    def divide(
        self, stage: int, holds: Holds, pieces: Sequence[Piece], digests: Digests, trained: Collection[str] | None
    ) -> list[list[Piece]]:
        """Divide pieces into each shard that is as before, other tensors that are or are not trained, and the rest."""
        of_kind = digests.get((stage, holds), {})
        remaining = {(piece.fqn, of_kind.get(piece.fqn, "")): piece for piece in pieces}
        shards, groups = self.tensors.get((stage, holds), ()), list[list[Piece]]()
        for shard in shards:
            if all(tensor in remaining for tensor in shard):
                groups.append([remaining.pop(tensor) for tensor in shard])
        present = {tensor for shard in shards for tensor in shard}
        parts: tuple[list[Piece], list[Piece]] = ([], [])
        for tensor, piece in remaining.items():
            is_same = tensor in present or (trained is not None and piece.fqn not in trained)
            parts[not is_same].append(piece)
        return [*groups, *(part for part in parts if part)]

    def linked_nbytes(self, state: Held, trained: Collection[str]) -> int:
        """Return the bytes of weights in shards that can be linked, as none of them is trained; nothing is hashed."""
        nbytes = 0
        for stage, kinds in state.items():
            frozen = {piece.fqn: piece for piece in kinds[WEIGHTS] if piece.fqn not in trained}
            for tensors in self.tensors.get((stage, WEIGHTS), ()):
                if all(fqn in frozen for fqn, _ in tensors):
                    pieces = [frozen[fqn] for fqn, _ in tensors]
                    shard = shard_of("", WEIGHTS, header_of(pieces, dict(tensors)), pieces)
                    nbytes += sum(piece.memory.nbytes for piece in pieces) if shard.digest in self.paths else 0
        return nbytes

    def link(self, shard: Shard, folder: Path) -> bool:
        """Link a shard of the same digest into a folder, and return whether that was possible."""
        source, path = self.paths.get(shard.digest), folder / shard.path
        try:
            if source is None or os.stat(source).st_size != shard.nbytes:
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, path)
            sync_folder(path.parent)
        except OSError:
            return False
        return True


def hash_pieces(state: Held, is_cancelled: Callable[[], bool]) -> Generator[None, None, Digests]:
    """Return the digests of all tensors, hashed part by part; of none if that is cancelled."""
    digests: dict[tuple[int, Holds], dict[str, str]] = {}
    for stage, kinds in state.items():
        for holds, pieces in kinds.items():
            of_kind = digests.setdefault((stage, holds), {})
            for piece in pieces:
                data, hasher = bytes_of(piece.memory.detach().cpu().contiguous()), Hasher()
                for start in range(0, len(data), PART_NBYTES):
                    if is_cancelled():
                        return {}
                    hasher.update(data[start : start + PART_NBYTES])
                    yield
                of_kind[piece.fqn] = hasher.hexdigest()
    return digests
