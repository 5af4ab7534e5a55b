"""Which rank this process is, with its stages and its node: what its errors begin with. No torch."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from manifests.schema import Manifest

__all__ = ["place_of", "rank_label", "set_rank_label", "stages_of"]

_declared: list[str] = []  # a process is one rank, as its process group is one


def set_rank_label(rank: int, stages: Sequence[int] = ()) -> None:
    """Let every later error of this process name its node, too, and its stages, once they are known."""
    _declared[:] = [place_of(rank, stages, socket.gethostname())]


def rank_label(rank: int) -> str:
    """Name this process, which is rank `rank`: `rank 2, stage 2, node n1`, or `rank 2` where nothing was declared."""
    return _declared[0] if _declared else f"rank {rank}"


def place_of(rank: int, stages: Sequence[int], node: str) -> str:
    if not stages:
        return f"rank {rank}, node {node}"
    word = "stage" if len(stages) == 1 else "stages"
    return f"rank {rank}, {word} {', '.join(map(str, stages))}, node {node}"


def stages_of(manifest: Manifest, rank: int, world_size: int) -> tuple[int, ...]:
    """Give the stages of a rank. Ranks that hold the same ones are neighbours."""
    placement = manifest.placement
    return placement.stages_on(rank * placement.num_ranks // world_size)
