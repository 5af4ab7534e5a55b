"""Which shards a checkpoint has, and which tensors of this rank each of them contains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch.distributed as dist

from manifests.index import MAX_SHARD_NBYTES, is_indexed, replicas_elsewhere, split_by_size
from manifests.paths import replicas_path, root_shard_path, shard_path
from manifests.schema import WEIGHTS, Holds, TieGroup
from runner.checkpoint.state import Held
from runner.tensors.local_shard import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardToWrite:
    """A shard that this rank writes: tensors, or its slices of them."""

    path: str
    holds: Holds
    pieces: Sequence[Piece]

    @property
    def is_indexed(self) -> bool:
        """Whether the Hugging Face index lists its tensors."""
        return is_indexed(self.holds, self.path)


def slices_in_stage_folders(held: Held, writer: int, num_writers: int) -> dict[int, list[ShardToWrite]]:
    """Return this rank's shards by stage, one of each kind, if `num_writers` ranks write each stage."""
    return {
        stage: [
            ShardToWrite(path=shard_path(stage, holds, number=writer, of=num_writers), holds=holds, pieces=pieces)
            for holds, pieces in kinds.items()
            if pieces
        ]
        for stage, kinds in held.items()
    }


def whole_in_root(
    held: Held, ties: Iterable[TieGroup], group: dist.ProcessGroup | None = None, most_nbytes: int = MAX_SHARD_NBYTES
) -> dict[int, list[ShardToWrite]]:
    """Return this rank's shards by stage: weights in the root, numbered over all stages, the rest in stage folders.

    Every rank of the group calls this: the numbers depend on what all of them write.
    See Note [A packed folder is a Hugging Face folder].
    """
    replicas = replicas_elsewhere(ties)
    shards = {stage: list(_in_stage_folder(stage, kinds, replicas, most_nbytes)) for stage, kinds in held.items()}
    runs = {
        stage: _split([piece for piece in kinds[WEIGHTS] if piece.fqn not in replicas], most_nbytes)
        for stage, kinds in held.items()
    }
    counts: list[dict[int, int]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(counts, {stage: len(of_stage) for stage, of_stage in runs.items()}, group=group)
    firsts, total = _number(counts)
    return {
        stage: [
            *(
                ShardToWrite(path=root_shard_path(number, total), holds=WEIGHTS, pieces=pieces)
                for number, pieces in zip(count(firsts[stage]), runs[stage], strict=False)
            ),
            *shards[stage],
        ]
        for stage in held
    }


def _in_stage_folder(
    stage: int, kinds: Mapping[Holds, Sequence[Piece]], replicas: frozenset[str], most_nbytes: int
) -> Iterable[ShardToWrite]:
    """Yield a stage's tied replicas, whose owner is on another stage, and its optimizer state."""
    if apart := [piece for piece in kinds[WEIGHTS] if piece.fqn in replicas]:
        yield ShardToWrite(path=replicas_path(stage), holds=WEIGHTS, pieces=apart)
    for holds, pieces in kinds.items():
        runs = [] if holds == WEIGHTS else _split(pieces, most_nbytes)
        for number, run in enumerate(runs):
            yield ShardToWrite(path=shard_path(stage, holds, number=number, of=len(runs)), holds=holds, pieces=run)


def _split(pieces: Sequence[Piece], most_nbytes: int) -> list[list[Piece]]:
    return split_by_size(pieces, lambda piece: piece.memory.nbytes, most_nbytes)


def _number(counts: Sequence[Mapping[int, int]]) -> tuple[dict[int, int], int]:
    """Return the number of each stage's first shard, and of all shards; one rank at most has shards of a stage."""
    by_stage: dict[int, int] = {}
    for of_rank in counts:
        for stage, number in of_rank.items():
            by_stage[stage] = by_stage.get(stage, 0) + number
    firsts, total = {}, 0
    for stage in sorted(by_stage):
        firsts[stage] = total
        total += by_stage[stage]
    return firsts, total
