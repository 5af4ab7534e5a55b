"""Estimates training on a layout: time and memory of stages and ranks, by simulating the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from manifests.brief import brief
from manifests.command.interpreter import collector_paused
from manifests.errors import Parameter
from manifests.models import ModelShape
from manifests.models.memory import Memory, MemoryEstimate, estimate_memory
from manifests.models.shape import is_layer
from manifests.models.training import POLICIES, Training, check_expert_degree
from manifests.module_times import ModuleTime, split_s
from manifests.optimizer_groups import state_counter
from manifests.placement import Placement
from manifests.schedules.simulation import StageCosts, Timeline, simulate
from reshard.estimate.assumptions import MOST_PASSES, Assumptions, num_passes
from reshard.estimate.costs import flops_of, times_of
from reshard.layouts.model import StageLayout

_EVEN = 0.0005  # relative; closer times count as equal


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate:
    """One simulated step: when each action runs, and the memory in use."""

    memory: MemoryEstimate
    timeline: Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Estimates of stages, ranks and one step, which is simulated.

    `step` is None, and there is no `memory`, if the step has more than 524,288 forward and backward passes. Tuples are
    by stage, and `rank_times` by rank; `bottleneck` has the slowest ranks, if most of the others wait for them.

    Units: `flops` per token of a forward pass; times of one microbatch in seconds if measured, else FLOPs per token.
    """

    assumed: Assumptions
    placement: Placement
    schedule: str
    num_microbatches: int
    flops: tuple[int, ...]  # forward, per token, by stage
    times: tuple[ModuleTime, ...]  # by stage
    step: StepEstimate | None
    overhead_s: float  # of a step beside its schedule, if that was measured

    __repr__ = brief

    @property
    def memory(self) -> MemoryEstimate:
        assert self.step is not None, "not simulated"
        return self.step.memory

    @property
    def timeline(self) -> Timeline:
        assert self.step is not None, "not simulated"
        return self.step.timeline

    @property
    def stage_times(self) -> tuple[float, ...]:
        """Forward and backward together, by stage."""
        return tuple(time.total for time in self.times)

    @property
    def rank_times(self) -> tuple[float, ...]:
        """The same over all stages of each rank."""
        placement, times = self.placement, self.stage_times
        return tuple(sum(times[stage] for stage in placement.stages_on(rank)) for rank in range(placement.num_ranks))

    @property
    def slowest_ranks(self) -> tuple[int, ...]:
        """The ranks with the longest time: all of them when they are even."""
        times = self.rank_times
        return tuple(rank for rank, time in enumerate(times) if time >= max(times) * (1 - _EVEN))

    @property
    def bottleneck(self) -> tuple[int, ...]:
        """The slowest ranks, if most of the others wait for them."""
        slowest = self.slowest_ranks
        return slowest if len(slowest) <= self.placement.num_ranks / 2 else ()

    @property
    def ranks_over_limit(self) -> tuple[int, ...]:
        limit = self.assumed.memory_limit
        return tuple(rank for rank, memory in enumerate(self.memory.ranks) if limit and memory.total > limit)


def forecast(shape: ModelShape, layout: StageLayout, assumed: Assumptions) -> Forecast:
    """Estimate training of a layout, simulating one step unless it is too long."""
    placement, degree = layout.placement, assumed.expert
    check_expert_degree(shape.count_experts() if degree > 1 else {}, degree, Parameter("assumed.expert"))
    num_microbatches = assumed.microbatches_for(placement)
    schedule = assumed.check_schedule(layout)
    flops, of_module = flops_of(shape, assumed.seq_len), times_of(shape, assumed.seq_len, assumed.measured)
    times = tuple(sum_times([of_module[module] for module in modules]) for modules in layout.stages)
    step, overhead_s = None, 0.0
    if num_passes(placement, num_microbatches) <= MOST_PASSES:
        how = None if assumed.run is None else assumed.run.how
        gap_s = assumed.overhead.gap_s if assumed.overhead is not None and placement.num_ranks > 1 else 0.0
        costs = costs_of_stages(times, layout.stages, how, gap_s=gap_s)
        with collector_paused():
            table = assumed.table_for(layout)
            memory = estimate_memory(shape, layout.stages, table, training_of(assumed, shape))
            step = StepEstimate(memory=memory, timeline=simulate(table, costs))
        if assumed.overhead is not None:
            overhead_s = max(
                _overhead_s(shape, layout, assumed, rank, memory.ranks[rank]) for rank in range(placement.num_ranks)
            )
    return Forecast(
        assumed=assumed,
        placement=placement,
        schedule=schedule,
        num_microbatches=num_microbatches,
        flops=tuple(sum(flops[module] for module in modules) for modules in layout.stages),
        times=times,
        step=step,
        overhead_s=overhead_s,
    )


def _overhead_s(shape: ModelShape, layout: StageLayout, assumed: Assumptions, rank: int, memory: Memory) -> float:
    """Return the seconds of a rank beside the schedule, of which its network rate says those of its gradients."""
    assert assumed.overhead is not None, "checked by the caller"
    owned, shards = shape.by_module(), assumed.shard * assumed.context
    stages = [layout.stages[stage] for stage in layout.placement.stages_on(rank)]
    num_params = sum(shape.count_params(fqn) for module in chain.from_iterable(stages) for fqn in owned[module])
    sent_s = 0.0
    if (link := assumed.overhead.link) is not None:
        sent_s = link.reduction_s(memory.weights, memory.gradients, shards=shards, replicas=assumed.replicate)
    return sent_s + assumed.overhead.overhead_of(num_params / (shards * assumed.tensor))


def training_of(assumed: Assumptions, shape: ModelShape) -> Training:
    """Return the assumptions that a model's memory depends on."""
    return Training(
        policy=POLICIES[assumed.policy],
        microbatch=assumed.microbatch,
        seq_len=assumed.seq_len,
        shard=assumed.shard * assumed.context,
        tensor=assumed.tensor,
        context=assumed.context,
        exchanges_heads=assumed.context > 1 and assumed.context_method == "ulysses",
        expert=assumed.expert,
        recompute=assumed.recompute,
        loss_chunk=assumed.loss_chunk,
        host_memory=assumed.host_memory,
        state_of=state_counter(assumed.optimizer, shape),
        keeps_average=assumed.ema > 0,
    )


def imbalance(times: Sequence[float]) -> float:
    """Return the slowest time over the mean time: 1 is even."""
    total = sum(times)
    return max(times) * len(times) / total if total else 1.0


def costs_of_stages(
    times: Sequence[ModuleTime], stages: Sequence[Sequence[str]], how: Mapping[str, Any] | None, *,
    hop_s: float = 0.0, gap_s: float,
) -> StageCosts:  # fmt: skip
    """Return the costs of stages with these modules; `how` is that of `split_s`, None where times are FLOPs."""
    num_layers = [sum(map(is_layer, modules)) for modules in stages]
    split = (
        () if how is None else [split_s(how, time.backward, num) for time, num in zip(times, num_layers, strict=True)]
    )
    return StageCosts.of(
        [time.forward for time in times], [time.backward for time in times], split_s=split, hop_s=hop_s, gap_s=gap_s
    )  # fmt: skip


def sum_times(times: Sequence[ModuleTime]) -> ModuleTime:
    return ModuleTime(forward=sum(time.forward for time in times), backward=sum(time.backward for time in times))
