"""The label of this process in its errors: rank, stages and node. No torch."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from manifests.schema import Manifest

_label: list[str] = []  # a process is one rank


def set_rank_label(rank: int, stages: Sequence[int] = ()) -> None:
    """Make every later error of this process also name its node, and its stages once they are known."""
    _label[:] = [place_of(rank, stages, socket.gethostname())]


def rank_label(rank: int) -> str:
    """Return this process's label: `rank 2, stage 2, node n1`, or `rank 2` before `set_rank_label`."""
    return _label[0] if _label else f"rank {rank}"


def place_of(rank: int, stages: Sequence[int], node: str) -> str:
    if not stages:
        return f"rank {rank}, node {node}"
    word = "stage" if len(stages) == 1 else "stages"
    return f"rank {rank}, {word} {', '.join(map(str, stages))}, node {node}"


def stages_of(manifest: Manifest, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the stages of a rank. Ranks that share their stages have consecutive numbers."""
    placement = manifest.placement
    return placement.stages_on(rank * placement.num_ranks // world_size)
