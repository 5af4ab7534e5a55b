"""Which tensors the checkpoint before has with the same bytes: their shards are linked, not written again.

# Note [Tensors that are stored once]
Frozen modules, and experts that no token reached, have the same bytes in one checkpoint after the other. Shards are
divided so that such tensors are apart from others, and one whose tensors all have the digests that they had is a hard
link to the file in the checkpoint before: the bytes are on disk once. Each checkpoint stays a whole folder for every
reader, and pruning one removes no byte of another, whoever prunes (docs/adr/0041). Where a file system has no links,
or the file is gone, the shard is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manifests.digest import Hasher
from manifests.errors import InputError
from manifests.schema import Holds, Shard
from manifests.store import open_shard, sync_folder
from runner.checkpoint.shard_file import PART_NBYTES
from runner.checkpoint.state import Held
from runner.load.fill import bytes_of
from runner.tensors.local_shard import Piece
from stores.open import open_manifest

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
