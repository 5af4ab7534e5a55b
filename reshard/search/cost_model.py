"""The memory, bubble and time of a candidate: in closed form for all, by the simulated schedule for the best few."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

from manifests.models import ModelShape
from manifests.models.memory import MOST_IN_TRANSIT, Memory, MemoryEstimate, estimate_memory
from manifests.models.shape import is_layer
from manifests.models.training import POLICIES, Recompute, Training
from manifests.module_times import ModuleTime, reduction_nbytes, split_s
from manifests.optimizer_groups import state_counter
from manifests.placement import Placement
from manifests.schedules.actions import Action, Table
from manifests.schedules.simulation import simulate
from manifests.schedules.tables import schedule_table
from reshard.estimate.assumptions import Policy
from reshard.estimate.costs import times_of
from reshard.estimate.module_seconds import ModuleSeconds
from reshard.estimate.training_estimate import costs_of_stages, sum_times
from reshard.layouts.model import StageLayout
from reshard.search.candidates import SPLIT, Candidate, SearchRequest

_MOST_ACTIONS = 4096  # forwards of a step that is simulated whole
_NUMBER = re.compile(r"\.\d+(?=\.)")  # of an expert
_ROUNDS = 4  # each of as many microbatches as there are pipeline ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateForecast:
    """What a candidate takes: bytes of the fullest rank, the fraction of time in which ranks wait, seconds."""

    memory: int
    bubble: float
    step_s: float


class CostModel:
    """Costs of a model's modules. Layers with the same tensors, optimizer state, work and window are one kind.

    An MTP layer is a kind of its own: the head keeps logits for each.
    """

    def __init__(self, shape: ModelShape, config: Mapping[str, Any], request: SearchRequest) -> None:
        self.shape, self.request, first = shape, request, dict[object, str]()
        owned, self._state_of = shape.by_module(), state_counter(request.optimizer, shape)
        self.kind_of = {
            module: first.setdefault(
                (
                    shape.work[module],
                    shape.windows.get(module, 0),
                    tuple((fqn[len(module) :], shape.tensors[fqn], self._state_of(fqn)) for fqn in fqns),
                    module if module in shape.optional else "",
                ),
                module,
            )
            for module, fqns in owned.items()
        }
        self.counts = Counter(self.kind_of.values())
        self._params = {kind: sum(map(shape.count_params, owned[kind])) for kind in self.counts}
        self.kinds = replace(
            shape, modules=tuple(self.counts), ties=(), work={kind: shape.work[kind] for kind in self.counts},
            tensors={fqn: shape.tensors[fqn] for kind in self.counts for fqn in owned[kind]},
        )  # fmt: skip
        copies, alike = Counter[str](), dict[object, str]()
        for kind in self.counts:
            for fqn in owned[kind]:
                name = _NUMBER.sub(".N", fqn[len(kind) :])
                copies[alike.setdefault((kind, name, shape.tensors[fqn], self._state_of(fqn)), fqn)] += 1
        # Each layer by the name of the first that is like it, and each expert.
        self._alike = replace(self.kinds, tensors={fqn: shape.tensors[fqn] for fqn in copies}, copies=copies)
        tied = [fqn for group in shape.ties for fqn in group]
        self._has_alike = self._alike.tensors.keys() >= set(tied)
        measured = request.measured
        if measured is not None:
            by_kind: dict[str, list[ModuleTime]] = defaultdict(list)
            for module, time in times_of(shape, request.seq_len, measured.modules).items():
                by_kind[self.kind_of[module]].append(time)
            means = {
                kind: ModuleTime(
                    forward=fmean(time.forward for time in several), backward=fmean(time.backward for time in several)
                )
                for kind, several in by_kind.items()
            }
            measured = replace(measured, modules=means)
        self._seconds = ModuleSeconds(
            self.kinds, config, seq_len=request.seq_len, hardware=request.hardware, efficiency=request.efficiency,
            per_node=request.per_node, measured=measured,
        )  # fmt: skip
        link = None if measured is None or measured.step is None else measured.step.link
        # Times as long as their bytes, to gather weights and to scatter gradients.
        self._shard_factor = link.rate / link.shard_rate if link is not None and request.hardware.measured else 1.0
        self._layouts: dict[str, StageLayout] = {}  # by their specs
        self._how = {"device": "cuda"} if measured is None else measured.how
        self._times, self._kinds_memory = cache(self._seconds.times), cache(self._make_kinds_memory)
        self._profiles, self._states = cache(self._make_profiles), cache(self._make_states)
        self._activations, self._loads = cache(self._make_activations), cache(self._make_loads)
        self._chunks, self._totals = cache(self._make_chunks), cache(self._make_totals)

    def estimate(self, candidate: Candidate) -> CandidateForecast:
        """Return what a candidate takes, in closed form; see `_chunks_in_flight` and `_fill`."""
        layout, context, number = candidate.layout, candidate.context, candidate.num_microbatches
        self._layouts[layout.spec] = layout
        degrees = layout.spec, candidate.policy, candidate.tensor, context
        states, weights, gradients = self._states(*degrees, candidate.shard * context, candidate.expert)
        shards = max(min(2, candidate.shard * context), context)
        used = self._activations(*degrees, shards, candidate.microbatch, candidate.recompute)
        slowest, busy, stepped = self._loads(layout.spec, candidate.schedule in SPLIT, *self._setting(candidate))
        chunks, virtual = self._chunks(layout.spec, candidate.schedule, number), layout.placement.num_virtual
        most = max(
            state + activations * in_flight // virtual + temporary
            for state, (activations, temporary), in_flight in zip(states, used, chunks, strict=True)
        )
        transfers = 2 * MOST_IN_TRANSIT * (candidate.pipeline > 1) * self._hidden_nbytes(candidate)
        slowest += 2 * virtual * self._gap_s(candidate)
        makespan = slowest * (number + _fill(candidate))
        bubble = 1 - busy * number / candidate.pipeline / makespan
        step_s = makespan + self._reduction_s(candidate, weights, gradients) + self._overhead_s(candidate, stepped)
        return CandidateForecast(memory=most + transfers, bubble=max(0.0, bubble), step_s=step_s)

    def state_nbytes(self, policy: Policy) -> int:
        """Return the bytes of all weights, gradients and optimizer state, each once: what GPUs need in any layout."""
        training = Training(policy=POLICIES[policy], microbatch=1, seq_len=self.request.seq_len)
        table = schedule_table("GPipe", Placement(num_stages=1, num_ranks=1), 1)
        return self._estimate_memory([self.shape.modules], table, training).stages[0].state

    def simulate(self, candidate: Candidate) -> CandidateForecast:
        """Return what a candidate takes, by its schedule's own table of actions.

        Of many microbatches, those of `_ROUNDS` rounds are simulated: each later round takes as long as the last of
        these, and no more memory.
        """
        placement, stages = candidate.layout.placement, candidate.layout.stages
        number, size = candidate.num_microbatches, placement.num_ranks
        is_long = number * placement.num_stages > _MOST_ACTIONS and number % size == 0
        simulated = min(number, _ROUNDS * size) if is_long else number
        table = schedule_table(candidate.schedule, placement, simulated)
        ranks = self._estimate_memory(stages, table, candidate.training(self.request.seq_len)).ranks
        seconds = self._times(*self._setting(candidate))
        times = [sum_times([seconds[self.kind_of[module]] for module in modules]) for modules in stages]
        hop_s = self._hidden_nbytes(candidate) / self._seconds.rate(2 * candidate.per_stage)
        costs = costs_of_stages(times, stages, self._how, hop_s=hop_s, gap_s=self._gap_s(candidate))
        timeline = simulate(table, costs)
        step_s = timeline.makespan_s
        if simulated < number:
            before_s = simulate(schedule_table(candidate.schedule, placement, simulated - size), costs).makespan_s
            step_s += (number - simulated) / size * (step_s - before_s)
        bubble = max(0.0, 1 - sum(timeline.busy_s) * number / simulated / (size * step_s))
        step_s += max(self._reduction_s(candidate, rank.weights, rank.gradients) for rank in ranks)
        *_, stepped = self._loads(candidate.layout.spec, candidate.schedule in SPLIT, *self._setting(candidate))
        step_s += self._overhead_s(candidate, stepped)
        return CandidateForecast(memory=max(rank.total for rank in ranks), bubble=bubble, step_s=step_s)

    def _estimate_memory(self, stages: Sequence[Sequence[str]], table: Table, training: Training) -> MemoryEstimate:
        """Return the memory of stages, with the request's optimizer; layers that are alike are counted once."""
        shape, training = self.shape, replace(training, state_of=self._state_of, keeps_average=self.request.ema > 0)
        if self._has_alike and not isinstance(training.recompute, int):  # of every N layers, one recomputes
            shape = replace(self._alike, ties=shape.ties)
            stages = [[self.kind_of[module] for module in stage] for stage in stages]
        return estimate_memory(shape, stages, table, training)

    def _make_profiles(self, spec: str) -> list[tuple[int, tuple[tuple[str, int], ...]]]:
        """Return the modules of ranks by kind: of ranks with the same ones, the first, which has the most in flight."""
        first: dict[tuple[tuple[str, int], ...], int] = {}
        placement, stages = self._layouts[spec].placement, self._layouts[spec].stages
        for rank in range(placement.num_ranks):
            kinds = (self.kind_of[module] for stage in placement.stages_on(rank) for module in stages[stage])
            first.setdefault(tuple(sorted(Counter(kinds).items())), rank)
        return [(rank, counts) for counts, rank in first.items()]

    def _make_kinds_memory(
        self, policy: Policy, tensor: int, context: int, shard: int, expert: int, microbatch: int, recompute: Recompute
    ) -> Mapping[str, Memory]:
        """Return the memory of each kind of module, each a stage, with the activations of one microbatch."""
        training = Training(
            policy=POLICIES[policy], microbatch=microbatch, seq_len=self.request.seq_len, shard=shard, context=context,
            tensor=tensor, expert=expert, recompute=recompute, state_of=self._state_of,
            keeps_average=self.request.ema > 0,
        )  # fmt: skip
        kinds = self.kinds.modules
        actions = [Action(stage=stage, kind="F", microbatch=0) for stage in range(len(kinds))]
        actions += [Action(stage=stage, kind="B", microbatch=0) for stage in reversed(range(len(kinds)))]
        placement = Placement(num_stages=len(kinds), num_ranks=1)
        table = Table(placement=placement, num_microbatches=1, ranks=(tuple(actions),))
        stages = estimate_memory(self._alike, [(kind,) for kind in kinds], table, training).stages
        return dict(zip(kinds, stages, strict=True))

    def _make_states(
        self, spec: str, policy: Policy, tensor: int, context: int, shard: int, expert: int
    ) -> tuple[list[int], float, float]:
        """Return the bytes of the state of each of `_profiles`, and of weights and gradients of a rank on average."""
        memory = self._kinds_memory(policy, tensor, context, shard, expert, 1, "none")
        profiles, num_ranks = self._profiles(spec), self._layouts[spec].placement.num_ranks
        states = [sum(count * memory[kind].state for kind, count in kinds) for _, kinds in profiles]
        weights = sum(count * memory[kind].weights for kind, count in self.counts.items())
        gradients = sum(count * memory[kind].gradients for kind, count in self.counts.items())
        return states, weights / num_ranks, gradients / num_ranks

    def _make_activations(
        self, spec: str, policy: Policy, tensor: int, context: int, shard: int, microbatch: int, recompute: Recompute
    ) -> list[tuple[int, int]]:
        """Return the bytes of a microbatch's activations, and the temporary ones, of each of `_profiles`."""
        memory = self._kinds_memory(policy, tensor, context, shard, 1, microbatch, recompute)
        sizes = {kind: (each.activations, each.temporary) for kind, each in memory.items()}
        return [
            (sum(count * sizes[kind][0] for kind, count in kinds), max(sizes[kind][1] for kind, _ in kinds))
            for _, kinds in self._profiles(spec)
        ]

    def _make_chunks(self, spec: str, schedule: str, number: int) -> list[int]:
        """Return how many results of its stages each of `_profiles` has in flight, of a number of microbatches."""
        placement = self._layouts[spec].placement
        return [_chunks_in_flight(placement, schedule, number, rank) for rank, _ in self._profiles(spec)]

    def _make_totals(self, splits: bool, *setting: Any) -> Mapping[str, float]:
        """Return the seconds of a microbatch in each kind of module, forward and backward."""
        times = self._times(*setting).items()
        return {kind: time.total + splits * split_s(self._how, time.backward, is_layer(kind)) for kind, time in times}

    def _make_loads(self, spec: str, splits: bool, *setting: Any) -> tuple[float, float, int]:
        """Return the seconds of a microbatch on the slowest rank, and on all; and the most parameters of a rank.

        With backwards in two parts these are upper limits: the first stage, which has none, takes longer too.
        """
        seconds = self._totals(splits, *setting)
        profiles = [kinds for _, kinds in self._profiles(spec)]
        slowest = max(sum(count * seconds[kind] for kind, count in kinds) for kinds in profiles)
        stepped = max(sum(count * self._params[kind] for kind, count in kinds) for kinds in profiles)
        return slowest, sum(count * seconds[kind] for kind, count in self.counts.items()), stepped

    def _setting(self, candidate: Candidate) -> tuple[Any, ...]:
        """Return what the times of modules depend on; see `ModuleSeconds.times`."""
        degrees = candidate.tensor, candidate.expert, candidate.context
        return *degrees, candidate.microbatch, candidate.recompute, POLICIES[candidate.policy].compute

    def _hidden_nbytes(self, candidate: Candidate) -> int:
        tokens = candidate.microbatch * self.request.seq_len // candidate.context
        return tokens * self.shape.hidden_size * POLICIES[candidate.policy].compute

    def _reduction_s(self, candidate: Candidate, weights: float, gradients: float) -> float:
        """Return the seconds in which a rank's gradients are reduced and its sharded weights gathered."""
        shards = candidate.shard * candidate.context
        sharded, replicated = reduction_nbytes(weights, gradients, shards=shards, replicas=candidate.replicate)
        sharded_s = self._shard_factor * sharded / self._seconds.rate(shards * candidate.tensor)
        return sharded_s + replicated / self._seconds.rate(candidate.per_stage)

    def _gap_s(self, candidate: Candidate) -> float:
        """Return the measured seconds in which an action hands its result to another rank."""
        measured = self.request.measured
        return 0.0 if candidate.pipeline == 1 or measured is None or measured.step is None else measured.step.gap_s

    def _overhead_s(self, candidate: Candidate, num_params: int) -> float:
        """Return the measured seconds of a step beside its schedule, for a rank of stages with so many parameters."""
        if self.request.measured is None or (step := self.request.measured.step) is None:
            return 0.0
        return step.overhead_of(num_params / (candidate.shard * candidate.context * candidate.tensor))


def _chunks_in_flight(placement: Placement, schedule: str, number: int, rank: int) -> int:
    """Return how many results of its stages a rank has in flight; see `manifests.schedules.tables`."""
    num_ranks, virtual = placement.num_ranks, placement.num_virtual
    ranks_after, groups = num_ranks - 1 - rank, (virtual - 1) * (number // max(1, number // num_ranks))
    chunks = {
        "1F1B": ranks_after + 1,
        "Interleaved1F1B": groups + 2 * ranks_after + 1,
        "InterleavedZeroBubble": groups + num_ranks,  # with the weight gradients that it delays
        "DualPipeV": 2 * num_ranks + 1,
    }.get(schedule, 2 * num_ranks)
    return min(chunks, virtual * number)


def _fill(candidate: Candidate) -> float:
    """Return how long the pipeline fills and drains, in a microbatch's time on a rank.

    Backwards in two parts, of equal length, fill two thirds of it.
    """
    placement = candidate.layout.placement
    return (placement.num_ranks - 1) / placement.num_virtual / (3 if candidate.schedule in SPLIT else 1)
