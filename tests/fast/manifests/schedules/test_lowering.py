"""Laws of lowering, of any table: tensors are sent and received in one order, gradients are reduced once, at the end.

A rank that receives in another order than its peer sends gets the tensor of another microbatch, without an error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import UsageError
from manifests.placement import Placement
from manifests.schedules.actions import Action, LoweredTable, Overlap, Table, Transfer, Upkeep
from manifests.schedules.lowering import compute_part, lower
from manifests.schedules.rules import SCHEDULES
from manifests.schedules.tables import schedule_table
from tests.fast.manifests.schedules.torch_tables import placed, placements_of

Result = tuple[int, str, int]  # stage, F or B, microbatch


def result_of(action: Action) -> Result:
    return action.stage, {"I": "B"}.get(action.kind, action.kind), action.microbatch


def neighbor_of(action: Action, placement: Placement) -> Result | None:
    """Return the result of another stage that an action needs."""
    stage = {"F": action.stage - 1, "B": action.stage + 1, "I": action.stage + 1}.get(action.kind, -1)
    return (stage, "F" if action.kind == "F" else "B", action.microbatch) if 0 <= stage < placement.num_stages else None


def actions_in(step: object) -> tuple[Action, ...]:
    if isinstance(step, Overlap):
        return step.forward, step.backward
    return (step,) if isinstance(step, Action) else ()


def wrong_reductions(lowered: LoweredTable) -> Iterator[str]:
    for rank, steps in enumerate(lowered.ranks):
        reduced = Counter[int]()
        for step in steps:
            if isinstance(step, Upkeep) and step.kind == "REDUCE_GRAD":
                reduced[step.stage] += 1
            for action in actions_in(step):
                if action.kind != "F" and reduced[action.stage]:
                    yield f"rank {rank} reduces stage {action.stage} before {action}"
        for stage in lowered.placement.stages_on(rank):
            if reduced[stage] != 1:
                yield f"{stage}REDUCE_GRAD occurs {reduced[stage]} times"


def wrong_transfers(lowered: LoweredTable) -> Iterator[str]:
    placement = lowered.placement
    sent, received = defaultdict[tuple[int, int], list[Result]](list), defaultdict[tuple[int, int], list[Result]](list)
    for rank, steps in enumerate(lowered.ranks):
        computed, arrived = set[Result](), set[Result]()
        for step in steps:
            if isinstance(step, Transfer):
                kind, is_receive = step.kind[-1], step.kind.startswith("RECV")
                peer_stage = step.stage + (1 if (kind == "F") != is_receive else -1)
                result = (peer_stage if is_receive else step.stage, kind, step.microbatch)
                peer = placement.rank_of(peer_stage)
                if peer == rank:
                    yield f"{step}: the other stage is on the same rank"
                if is_receive:
                    received[peer, rank].append(result)
                    arrived.add(result)
                else:
                    sent[rank, peer].append(result)
                    if result not in computed:
                        yield f"rank {rank}: {step} before its result is computed"
            for action in actions_in(step):
                needed = neighbor_of(action, placement)
                if needed is not None and needed not in (computed if placement.rank_of(needed[0]) == rank else arrived):
                    yield f"rank {rank}: {action} before its input"
                computed.add(result_of(action))
    for source, target in sent.keys() | received.keys():
        for leaves, enters in zip_longest(sent[source, target], received[source, target]):
            if leaves != enters:
                yield f"rank {source} sends {leaves} to rank {target}, which expects {enters}"


def wrong_in(lowered: LoweredTable) -> list[str]:
    return [*wrong_reductions(lowered), *wrong_transfers(lowered)]


def any_order(random: Random, placement: Placement, num_microbatches: int) -> Table:
    """Return a table that a user may write: each action at any time at which its inputs are there."""
    pending: list[Action] = []
    for stage in range(placement.num_stages):
        for microbatch in range(num_microbatches):
            pending += (Action(stage, kind, microbatch) for kind in random.choice(("FB", "FIW")))  # type: ignore[arg-type]
    ranks: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    done = set[Result]()

    def is_ready(action: Action) -> bool:
        before = {"F": None, "W": "B"}.get(action.kind, "F")  # of the same stage
        needed = [neighbor_of(action, placement), (action.stage, before, action.microbatch) if before else None]
        return done.issuperset(result for result in needed if result)

    while pending:
        action = random.choice([action for action in pending if is_ready(action)])
        pending.remove(action)
        ranks[placement.rank_of(action.stage)].append(action)
        done.add(result_of(action))
    return Table(placement=placement, num_microbatches=num_microbatches, ranks=tuple(map(tuple, ranks)))


@given(st.data())
def test_schedules_are_lowered_to_matching_transfers_and_one_reduction(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SCHEDULES))
    placement = data.draw(st.sampled_from(placements_of(name, data.draw(st.integers(1, 4)))))
    group = data.draw(st.none() | st.integers(1, 6)) if name == "Interleaved1F1B" else None
    try:
        table = schedule_table(name, placement, data.draw(st.integers(1, 12)), microbatch_group=group)
    except UsageError:  # not of so many microbatches
        return
    assert wrong_in(lower(table)) == []
    assert compute_part(lower(table)) == table


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_any_order_of_a_user_is_lowered_to_matching_transfers_and_one_reduction(
    random: Random, num_ranks: int, num_virtual: int, num_microbatches: int
) -> None:
    table = any_order(random, placed(num_ranks, num_virtual), num_microbatches)
    assert wrong_in(lower(table)) == []
    assert compute_part(lower(table)) == table


@pytest.mark.parametrize("kind", ["SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD"])
def test_laws_refuse_a_step_that_is_left_out_or_in_another_place(kind: str) -> None:
    lowered = lower(schedule_table("1F1B", placed(2), 3))
    for rank, steps in enumerate(lowered.ranks):
        for at, step in enumerate(steps):
            if isinstance(step, Transfer | Upkeep) and step.kind == kind:
                rest = steps[:at] + steps[at + 1 :]
                for changed in (rest, (step, *rest) if kind in ("REDUCE_GRAD", "SEND_F", "SEND_B") else (*rest, step)):
                    ranks = tuple(changed if number == rank else row for number, row in enumerate(lowered.ranks))
                    assert wrong_in(replace(lowered, ranks=ranks)) != [], step
