"""Lowering of compute tables: adds transfers between ranks and upkeep of sharded stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from manifests.placement import Placement
from manifests.schedules.actions import (
    Action,
    LoweredStep,
    LoweredTable,
    Overlap,
    Step,
    Table,
    Transfer,
    Upkeep,
    actions_of,
)
from manifests.schedules.order import in_order

_MAX_GATHERED = 3  # stages that are unsharded on a rank at once: one forward, one backward, one prefetched


@lru_cache(maxsize=1)  # a run plans, checks and trains one; 131,072 actions take 2 s
def lower(table: Table) -> LoweredTable:
    """Add the transfers and upkeep with which torch 2.13 runs a table of compute actions.

    # Note [Order of transfers]
    A send and its receive are appended to both ranks' lists at the same time, so any two ranks agree on the order
    of all transfers between them. Point-to-point messages match by order alone: receives in another order get
    each other's tensors, silently if shapes are equal. torch 2.13's own `defer_pp_recv=True` does so to ZBVZeroBubble
    and InterleavedZeroBubble on 2 gloo ranks: gradients are wrong by their own size, without an error.

    Source: `_prepare_schedule_with_comms` in torch/distributed/pipelining/schedules.py.
    """
    placement = table.placement
    ranks: list[list[LoweredStep]] = [[] for _ in table.ranks]
    kept_up = [_with_upkeep(steps, table.num_microbatches) for steps in table.ranks]
    for rank, step in in_order(kept_up, placement):
        ranks[rank].append(step)
        for action in actions_of(step):
            for send, receive in _transfers(action, placement):
                ranks[rank].append(send)
                ranks[placement.rank_of(receive.stage)].append(receive)
    return LoweredTable(
        placement=placement, num_microbatches=table.num_microbatches, ranks=tuple(tuple(steps) for steps in ranks)
    )


def compute_part(lowered: LoweredTable) -> Table:
    """Return the table without transfers and upkeep."""
    return Table(
        placement=lowered.placement,
        num_microbatches=lowered.num_microbatches,
        ranks=tuple(tuple(step for step in steps if isinstance(step, Action | Overlap)) for steps in lowered.ranks),
    )


def _transfers(action: Action, placement: Placement) -> list[tuple[Transfer, Transfer]]:
    """Return the send and the receive after an action, if its result is needed on another rank."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "W":
        return []
    target = stage + 1 if action.kind == "F" else stage - 1
    if not 0 <= target < placement.num_stages or placement.rank_of(target) == placement.rank_of(stage):
        return []
    if action.kind == "F":
        send = Transfer(stage=stage, kind="SEND_F", microbatch=microbatch)
        return [(send, Transfer(stage=target, kind="RECV_F", microbatch=microbatch))]
    send = Transfer(stage=stage, kind="SEND_B", microbatch=microbatch)
    return [(send, Transfer(stage=target, kind="RECV_B", microbatch=microbatch))]


def _with_upkeep(steps: Sequence[Step], num_microbatches: int) -> list[LoweredStep]:
    """Unshard each stage before its use and reshard it when others come first; reduce after its last backward."""
    kept_up: list[LoweredStep] = []
    gathered, num_backwards = set[int](), Counter[int]()
    for step, needed in zip(steps, _next_stages(steps), strict=True):
        kept_up += (Upkeep(stage=stage, kind="RESHARD") for stage in sorted(gathered.difference(needed)))
        kept_up += (Upkeep(stage=stage, kind="UNSHARD") for stage in needed if stage not in gathered)
        gathered = set(needed)
        kept_up.append(step)
        for action in actions_of(step):
            num_backwards[action.stage] += action.kind in "BW"
            if action.kind in "BW" and num_backwards[action.stage] == num_microbatches:
                kept_up.append(Upkeep(stage=action.stage, kind="REDUCE_GRAD"))
    kept_up += (Upkeep(stage=stage, kind="RESHARD") for stage in sorted(gathered))
    return kept_up


def _next_stages(steps: Sequence[Step]) -> list[list[int]]:
    """Return for each step the stages used next, in order of use, as many as may be unsharded at once."""
    upcoming: list[int] = []
    following: list[list[int]] = []
    for step in reversed(steps):
        stages = [action.stage for action in actions_of(step)]
        upcoming = [*stages, *(stage for stage in upcoming if stage not in stages)]
        following.append(upcoming[:_MAX_GATHERED])
    return following[::-1]
