"""The memory, bubble and time of a candidate: in closed form for all, by the simulated schedule for the best few.

# Note [Time of a step]
Ranks compute at a share of their GPU's peak, and wait for what they send: nothing overlaps. A layer's tensor-parallel
ranks reduce a tensor for each matrix that they share, two of them forward: the results of attention and MLP, and the
gradients of what each other matrix takes; for experts, one forward and one backward. Experts receive each token's
hidden state, and send it back, as many times as a token has experts, each tensor-parallel rank for a part of the
tokens. Context-parallel ranks gather the keys and values of whole rows (`--cp-method gather`), and reduce their
gradients. Gradients are reduced, and sharded weights gathered, once per step. Rings move (n - 1) / n of a tensor to
gather or to scatter it, and twice that to reduce it everywhere. Groups of adjacent ranks that fit on a node use its
links.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean
from typing import Any

from manifests.models import ModelShape, is_expert
from manifests.models.memory import MOST_IN_TRANSIT, Memory, MemoryEstimate, estimate_memory, is_divided
from manifests.models.shape import BACKWARD_SHARE
from manifests.models.training import POLICIES, Recompute, Training, parse_recompute
from manifests.module_times import ModuleTime, reduction_nbytes, ring
from manifests.optimizer_groups import state_counter
from manifests.placement import Placement
from manifests.schedules.actions import Action, Table
from manifests.schedules.simulation import StageCosts, simulate
from manifests.schedules.tables import schedule_table
from reshard.estimate.assumptions import Policy
from reshard.estimate.costs import times_of
from reshard.search.candidates import SPLIT, Candidate, SearchRequest

_MOST_ACTIONS = 4096  # forwards of a step that is simulated whole
_NUMBER = re.compile(r"\.\d+(?=\.)")  # of an expert
_ROUNDS = 4  # each of as many microbatches as there are pipeline ranks
_NUM_RESULTS = 2  # of a layer, attention's and the MLP's, which its tensor-parallel ranks reduce


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateForecast:
    """What a candidate takes: bytes of the fullest rank, the fraction of time in which ranks wait, seconds."""

    memory: int
    bubble: float
    step_s: float


class CostModel:
    """Costs of a model's modules. Layers with the same tensors, optimizer state and work are one kind of module."""

    def __init__(self, shape: ModelShape, config: Mapping[str, Any], request: SearchRequest) -> None:
        self.shape, self.request, first = shape, request, dict[object, str]()
        owned, self._state_of = shape.by_module(), state_counter(request.optimizer, shape)
        self.kind_of = {
            module: first.setdefault(
                (
                    shape.work[module],
                    tuple((fqn[len(module) :], shape.tensors[fqn], self._state_of(fqn)) for fqn in fqns),
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
        self.has_experts = {kind: any(map(is_expert, owned[kind])) for kind in self.counts}
        self._num_matrices = {  # that tensor-parallel ranks share; experts reduce as two of them do
            kind: 2 * self.has_experts[kind] + sum(self._is_matrix(fqn) for fqn in owned[kind]) for kind in self.counts
        }
        fields = section if isinstance(section := config.get("text_config"), Mapping) else config
        self.top_k = fields.get("num_experts_per_tok") or 1
        self._measured: Mapping[str, tuple[float, float]] = {}
        self._latency_s = 0.0
        if request.measured is not None:
            if request.measured.step is not None:
                self._latency_s = request.measured.step.latency_s
            times = times_of(shape, request.seq_len, request.measured.modules)
            by_kind: dict[str, list[ModuleTime]] = defaultdict(list)
            for module, time in times.items():
                by_kind[self.kind_of[module]].append(time)
            self._measured = {
                kind: (fmean(time.forward for time in several), fmean(time.backward for time in several))
                for kind, several in by_kind.items()
            }
        self._times, self._kinds_memory = cache(self._make_times), cache(self._make_kinds_memory)
        self._profiles = cache(self._make_profiles)

    def _is_matrix(self, fqn: str) -> bool:
        return is_divided(fqn, self.shape) and not is_expert(fqn) and self.shape.count_params(fqn) > 0  # no scales

    def estimate(self, candidate: Candidate) -> CandidateForecast:
        """Return what a candidate takes, in closed form; see `_chunks_in_flight` and `_fill`."""
        seconds, context = self._seconds(candidate), candidate.context
        degrees = candidate.policy, candidate.tensor, context
        state = self._kinds_memory(*degrees, candidate.shard * context, candidate.expert, 1, "none")
        shards = max(min(2, candidate.shard * context), context)
        used = self._kinds_memory(*degrees, shards, 1, candidate.microbatch, candidate.recompute)
        most, slowest, stepped, virtual = 0, 0.0, 0, candidate.layout.placement.num_virtual
        for rank, counts in self._profiles(candidate.layout.placement, candidate.layout.stages):
            total = sum(count * state[kind].state for kind, count in counts)
            activations = sum(count * used[kind].activations for kind, count in counts)
            total += activations * _chunks_in_flight(candidate, rank) // virtual
            most = max(most, total + max(used[kind].temporary for kind, _ in counts))
            slowest = max(slowest, sum(count * seconds[kind].total for kind, count in counts))
            stepped = max(stepped, sum(count * self._params[kind] for kind, count in counts))
        transfers = 2 * MOST_IN_TRANSIT * (candidate.pipeline > 1) * self._hidden_nbytes(candidate)
        makespan = slowest * (candidate.num_microbatches + _fill(candidate))
        ratio = candidate.num_microbatches / candidate.pipeline / makespan
        busy = sum(count * seconds[kind].total for kind, count in self.counts.items()) * ratio
        weights, gradients = (
            sum(count * getattr(state[kind], name) for kind, count in self.counts.items()) / candidate.pipeline
            for name in ("weights", "gradients")
        )
        step_s = makespan + self._reduction_s(candidate, weights, gradients) + self._overhead_s(candidate, stepped)
        return CandidateForecast(memory=most + transfers, bubble=max(0.0, 1 - busy), step_s=step_s)

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
        seconds = self._seconds(candidate)
        times = [[seconds[self.kind_of[module]] for module in stage] for stage in stages]
        costs = StageCosts.of(
            [sum(time.forward for time in stage) for stage in times],
            [sum(time.backward for time in stage) for stage in times],
            hop_s=self._hidden_nbytes(candidate) / self._rate(2 * candidate.per_stage),
        )
        timeline = simulate(table, costs)
        step_s = timeline.makespan_s
        if simulated < number:
            before_s = simulate(schedule_table(candidate.schedule, placement, simulated - size), costs).makespan_s
            step_s += (number - simulated) / size * (step_s - before_s)
        bubble = max(0.0, 1 - sum(timeline.busy_s) * number / simulated / (size * step_s))
        step_s += max(self._reduction_s(candidate, rank.weights, rank.gradients) for rank in ranks)
        profiles = self._profiles(placement, stages)
        stepped = max(sum(count * self._params[kind] for kind, count in counts) for _, counts in profiles)
        step_s += self._overhead_s(candidate, stepped)
        return CandidateForecast(memory=max(rank.total for rank in ranks), bubble=bubble, step_s=step_s)

    def _estimate_memory(self, stages: Sequence[Sequence[str]], table: Table, training: Training) -> MemoryEstimate:
        """Return the memory of stages, with the request's optimizer; layers that are alike are counted once."""
        shape, training = self.shape, replace(training, state_of=self._state_of, keeps_average=self.request.ema > 0)
        if self._has_alike and not isinstance(training.recompute, int):  # of every N layers, one recomputes
            shape = replace(self._alike, ties=shape.ties)
            stages = [[self.kind_of[module] for module in stage] for stage in stages]
        return estimate_memory(shape, stages, table, training)

    def _make_profiles(
        self, placement: Placement, stages: Sequence[Sequence[str]]
    ) -> list[tuple[int, tuple[tuple[str, int], ...]]]:
        """Return the modules of ranks by kind: of ranks with the same ones, the first, which has the most in flight."""
        first: dict[tuple[tuple[str, int], ...], int] = {}
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

    def _seconds(self, candidate: Candidate) -> Mapping[str, ModuleTime]:
        degrees = candidate.tensor, candidate.expert, candidate.context
        nbytes = POLICIES[candidate.policy].compute
        return self._times(*degrees, candidate.microbatch, candidate.recompute, nbytes)

    def _make_times(
        self, tensor: int, expert: int, context: int, microbatch: int, recompute: Recompute, nbytes: int
    ) -> Mapping[str, ModuleTime]:
        """Return the seconds of each kind of module for one microbatch; see Note [Time of a step]."""
        request, times = self.request, {}
        for kind in self.kinds.modules:
            forward, backward = self._compute(kind, microbatch * request.seq_len // context, tensor)
            row_tokens = microbatch * request.seq_len
            sent = self._sending(kind, tensor, expert, context, row_tokens, nbytes, request.per_node)
            again = _recomputed(recompute) * (forward + sent.forward) if _is_layer(kind) else 0.0
            times[kind] = ModuleTime(forward=forward + sent.forward, backward=backward + sent.backward + again)
        return times

    def _sending(
        self, kind: str, tensor: int, expert: int, context: int, row_tokens: int, nbytes: int, per_node: int
    ) -> ModuleTime:
        """Return the seconds in which a module sends hidden states, and gathers keys, of whole rows' tokens."""
        rate = partial(self._rate, per_node=per_node)
        hidden, reduction_s, routed_s = row_tokens // context * self.shape.hidden_size * nbytes, 0.0, 0.0
        if _is_layer(kind) and tensor > 1:
            reduction_s = self._latency_s + 2 * ring(tensor) * hidden / rate(tensor)
        if self.has_experts[kind]:
            routed_s = 2 * ring(expert) * self.top_k * hidden / tensor / rate(expert)
        keys = row_tokens * self.shape.work[kind].keys * nbytes / tensor
        gathered_s = ring(context) * keys / rate(tensor * context)
        num_gradients = max(_NUM_RESULTS, self._num_matrices[kind] - _NUM_RESULTS)
        return ModuleTime(
            forward=_NUM_RESULTS * reduction_s + routed_s + gathered_s,
            backward=num_gradients * reduction_s + routed_s + 2 * gathered_s,
        )

    def _compute(self, kind: str, tokens: int, tensor: int) -> tuple[float, float]:
        """Return the seconds in which a kind of module computes forward and backward, without recomputation.

        Of measured ones, what the run itself sent is subtracted, unless it takes longer at these rates.
        """
        request = self.request
        if request.measured is None:
            flops = self.shape.work[kind].forward_flops(request.seq_len) * tokens
            forward = flops / (request.hardware.peak * request.efficiency * tensor)
            return forward, BACKWARD_SHARE * forward
        how, scale = request.measured.how, request.measured.scale_to(tokens, tensor)
        degrees = how.get("tp", 1), how.get("ep", 1), how.get("cp", 1)
        nbytes = POLICIES["bf16" if how.get("dtype") == "bf16" else "fp32"].compute
        per_node = how.get("ranks_per_node", request.per_node)
        sent = self._sending(kind, *degrees, how["microbatch"] * how["seq_len"], nbytes, per_node)
        forward, backward = self._measured[kind]
        if _is_layer(kind):
            backward -= _recomputed(parse_recompute(str(how.get("ac", "none")))) * forward
        if forward < sent.forward or backward < sent.backward:
            return scale * forward, scale * max(0.0, backward)
        return scale * (forward - sent.forward), scale * (backward - sent.backward)

    def _rate(self, num_adjacent: int, per_node: int | None = None) -> float:
        hardware = self.request.hardware
        return hardware.node if (per_node or self.request.per_node) % num_adjacent == 0 else hardware.network

    def _hidden_nbytes(self, candidate: Candidate) -> int:
        tokens = candidate.microbatch * self.request.seq_len // candidate.context
        return tokens * self.shape.hidden_size * POLICIES[candidate.policy].compute

    def _reduction_s(self, candidate: Candidate, weights: float, gradients: float) -> float:
        """Return the seconds in which a rank's gradients are reduced and its sharded weights gathered."""
        shards = candidate.shard * candidate.context
        sharded, replicated = reduction_nbytes(weights, gradients, shards=shards, replicas=candidate.replicate)
        return sharded / self._rate(shards * candidate.tensor) + replicated / self._rate(candidate.per_stage)

    def _overhead_s(self, candidate: Candidate, num_params: int) -> float:
        """Return the measured seconds of a step beside its schedule, for a rank of stages with so many parameters."""
        if self.request.measured is None or (step := self.request.measured.step) is None:
            return 0.0
        return step.overhead_of(num_params / (candidate.shard * candidate.context * candidate.tensor))


def _is_layer(kind: str) -> bool:
    return kind.rpartition(".")[2].isdecimal()


def _recomputed(recompute: Recompute) -> float:
    """Return the share of layers of which --ac repeats the forward."""
    return 1.0 if recompute == "full" else 1 / recompute if isinstance(recompute, int) else 0.0


def _chunks_in_flight(candidate: Candidate, rank: int) -> int:
    """Return how many results of its stages a rank has in flight; see `manifests.schedules.tables`."""
    num_ranks, virtual, number = candidate.pipeline, candidate.layout.placement.num_virtual, candidate.num_microbatches
    ranks_after, groups = num_ranks - 1 - rank, (virtual - 1) * (number // max(1, number // num_ranks))
    chunks = {
        "1F1B": ranks_after + 1,
        "Interleaved1F1B": groups + 2 * ranks_after + 1,
        "InterleavedZeroBubble": groups + num_ranks,  # with the weight gradients that it delays
        "DualPipeV": 2 * num_ranks + 1,
    }.get(candidate.schedule, 2 * num_ranks)
    return min(chunks, virtual * number)


def _fill(candidate: Candidate) -> float:
    """Return how long the pipeline fills and drains, in a microbatch's time on a rank.

    Backwards in two parts, of equal length, fill two thirds of it.
    """
    placement = candidate.layout.placement
    return (placement.num_ranks - 1) / placement.num_virtual / (3 if candidate.schedule in SPLIT else 1)
