"""The layouts, schedules and degrees that a number of GPUs allows, without those that a launch refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

from manifests.command import defaults
from manifests.errors import UserError
from manifests.models import ModelShape
from manifests.models.combinations import check_degrees, why_not_proven
from manifests.models.mtp import MtpLayers, count_layers
from manifests.models.trainable import check_modules, generic_entry
from manifests.models.training import POLICIES, Recompute, Training
from manifests.module_times import MeasuredTimes
from manifests.placement import Placement
from manifests.schedules.rules import V_SCHEDULES, ScheduleName, check_schedule
from reshard.estimate.assumptions import MOST_PASSES, Policy, num_passes
from reshard.estimate.module_seconds import Hardware
from reshard.layouts.model import Inventory, ModuleCosts, StageLayout
from reshard.layouts.spelling import parse_layout

MARGIN = 0.9  # of the memory is planned: ranks need more than their plan, see docs/layouts.md
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # the fastest first
_VIRTUAL = (1, 2, 3, 4, 5, 6, 8)
_MOST_SOLVED = 2  # stages a rank for which the solver takes milliseconds
_MICROBATCHES = (1, 2, 4, 8)
_MOST_EXPERT = 64  # expert-parallel ranks, where --ep does not say how many
# Without GPipe and LoopedBFS: they wait as long as 1F1B and Interleaved1F1B, and need more memory.
LOOP: tuple[ScheduleName, ...] = ("Interleaved1F1B", "InterleavedZeroBubble")
SPLIT = ("InterleavedZeroBubble", *V_SCHEDULES)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """What to search for. `fixed` has what every layout must have, by the names of Candidate's fields.

    Times of modules are `measured` in a run, or follow from the hardware's peak and the efficiency.

    Units: `memory_limit` in bytes of a GPU, `global_batch` in sequences of `seq_len` tokens.
    """

    gpus: int
    memory_limit: int
    global_batch: int
    seq_len: int
    hardware: Hardware
    efficiency: float
    gpus_per_node: int
    optimizer: str = defaults.OPTIMIZER
    ema: float = 0.0
    measured: MeasuredTimes | None = None
    fixed: Mapping[str, Any]

    @property
    def per_node(self) -> int:
        """The ranks of a node, the same number on each."""
        return max(number for number in divisors(self.gpus) if number <= self.gpus_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout, a schedule and degrees, which `runner launch` accepts."""

    layout: StageLayout
    schedule: ScheduleName
    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int
    microbatch: int
    num_microbatches: int
    recompute: Recompute
    policy: Policy

    @property
    def pipeline(self) -> int:
        return self.layout.placement.num_ranks

    @property
    def per_stage(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def degrees(self) -> tuple[int, ...]:
        """Those of which a search shows the best layout each."""
        return self.pipeline, self.tensor, self.expert, self.context

    def training(self, seq_len: int) -> Training:
        return Training(
            policy=POLICIES[self.policy], microbatch=self.microbatch, seq_len=seq_len,
            shard=self.shard * self.context, context=self.context, tensor=self.tensor, expert=self.expert,
            recompute=self.recompute,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Space:
    """The model and the request; `refusals` collects why degrees are left out, in the order of the search."""

    shape: ModelShape
    kinds: ModelShape  # of which each kind of module is in the model once
    config: Mapping[str, Any]
    inventory: Inventory
    costs: Mapping[str, ModuleCosts]
    request: SearchRequest
    is_described: bool
    is_own: bool  # trained by a family of another package
    refusals: dict[str, None] = field(default_factory=dict)
    _reasons: dict[tuple[object, ...], str] = field(default_factory=dict)

    def candidates(self, policy: Policy, *, crosses_nodes: bool) -> Iterator[Candidate]:
        """Yield the candidates of a dtype policy whose tensor- and context-parallel ranks fit on a node, or the others.

        With a fixed degree of context parallelism, all are yielded.
        """
        gpus, batch = self.request.gpus, self.request.global_batch
        choices = self._allowed("microbatch", _MICROBATCHES), self._allowed("recompute", RECOMPUTE)
        for pipeline in self._allowed("pipeline", divisors(gpus)):
            layouts = [] if gpus % pipeline else list(self._layouts(pipeline))
            for degrees in self._degrees(gpus // pipeline, policy, crosses_nodes) if layouts else ():
                for (layout, schedule), microbatch, recompute in product(layouts, *choices):
                    number, rest = divmod(batch, microbatch * degrees["replicate"] * degrees["shard"])
                    if rest or not number:
                        reason = f"--global-batch {batch}: no multiple of --microbatch x data-parallel ranks"
                        self.refusals.setdefault(reason)
                    elif self._runs(layout.placement, schedule, number):
                        yield Candidate(
                            layout=layout, schedule=schedule, microbatch=microbatch, num_microbatches=number,
                            recompute=recompute, policy=policy, **degrees,
                        )  # fmt: skip

    def _allowed(self, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.request.fixed[name],) if name in self.request.fixed else values

    def _layouts(self, pipeline: int) -> Iterator[tuple[StageLayout, ScheduleName]]:
        """Yield the layouts on so many pipeline ranks, each with its schedules."""
        for virtual in _VIRTUAL if pipeline > 1 else (1,):
            if pipeline * virtual > self.shape.num_layers:
                self.refusals.setdefault(f"more than {self.shape.num_layers} stages: a stage has a layer or more")
                return
            loop: tuple[ScheduleName, ...] = ("1F1B",) if virtual == 1 else LOOP
            for style, schedules in (("", loop), (",style=v", V_SCHEDULES if virtual == 2 else ())):
                allowed = [name for name in self._allowed("schedule", schedules) if name in schedules]
                if allowed and (layout := self._layout(pipeline, virtual, style)) is not None:
                    yield from ((layout, name) for name in allowed if not self._refusal(schedule=name))

    def _layout(self, pipeline: int, virtual: int, style: str) -> StageLayout | None:
        """Return the layout whose slowest rank is the fastest, or an even one where solving takes long."""
        spec = f"pp={pipeline}" + (f",vpp={virtual}" if virtual > 1 else "") + style
        spec = f"balance:time,{spec}" if pipeline > 1 and virtual <= _MOST_SOLVED else spec
        entry = None if self.is_described else generic_entry(self.shape.architecture)
        try:
            layout = parse_layout(spec, self.inventory, costs=self.costs)
            if entry is not None:
                check_modules(entry, MtpLayers.trained_modules(entry, self.shape), layout.stages, "config.json")
            return layout
        except UserError as error:
            self.refusals.setdefault(f"{spec}: {error.problem}")
            return None

    def _degrees(self, per_stage: int, policy: Policy, crosses_nodes: bool) -> Iterator[dict[str, int]]:
        node, has_experts = self.request.per_node, bool(self.kinds.count_experts())
        contexts = self._allowed("context", divisors(node))
        for tensor, context in product(self._allowed("tensor", divisors(per_stage)), contexts):
            data, rest = divmod(per_stage, tensor * context)
            if (tensor * context > node) is not crosses_nodes and "context" not in self.request.fixed:
                continue
            if rest or tensor > node or self._refusal(tensor=tensor, context=context):
                continue
            if context > 1 and self.request.seq_len % (2 * context):
                self.refusals.setdefault(f"--seq-len {self.request.seq_len}: no multiple of 2 x --cp")
                continue
            shards = {1, data, node // tensor // context}  # FSDP over all ranks or over those of a node
            for shard in self._allowed("shard", tuple(sorted(shards))):
                if not shard or data % shard:
                    continue
                replicate, replica = data // shard, shard * context * tensor
                experts = (
                    tuple(number for number in divisors(replica) if number <= _MOST_EXPERT) if has_experts else (1,)
                )
                for expert in self._allowed("expert", experts):
                    degrees = {"shard": shard, "context": context, "tensor": tensor, "expert": expert}
                    if replica % expert or self._refusal(policy=policy, **degrees):
                        continue
                    if replicate in self._allowed("replicate", (replicate,)):
                        yield {"replicate": replicate, **degrees}

    def _refusal(
        self, *, policy: Policy = "mixed", shard: int = 1, context: int = 1, tensor: int = 1, expert: int = 1,
        schedule: str = "1F1B",
    ) -> str:  # fmt: skip
        """Return why a launch refuses these degrees, or nothing, and note the reason."""
        training = Training(
            policy=POLICIES[policy], microbatch=1, seq_len=self.request.seq_len, shard=min(2, shard) * context,
            context=context, tensor=tensor, expert=expert,
        )  # fmt: skip
        key = policy, training.shard, context, tensor, expert, schedule
        if key not in self._reasons:
            reason = why_not_proven(self.shape.architecture, self.config, training)
            features = {
                "schedule": schedule, "splits_backward": schedule in SPLIT, "num_mtp_layers": count_layers(self.shape),
            }  # fmt: skip
            try:
                check_degrees(self.kinds, self.config, training, is_own=self.is_own, **features)
            except UserError as error:
                reason = reason or f"{error.where}: {error.problem.splitlines()[0]}"
            self._note(key, reason)
        return self._reasons[key]

    def _runs(self, placement: Placement, schedule: ScheduleName, num_microbatches: int) -> bool:
        key = placement, schedule, num_microbatches
        if key not in self._reasons:
            reason = ""
            try:
                if placement.num_ranks > 1:
                    check_schedule(schedule, placement, num_microbatches)
                if num_passes(placement, num_microbatches) > MOST_PASSES:
                    reason = "steps too long to simulate"
            except UserError:
                reason = f"{schedule}: too few microbatches, or uneven rounds"
            self._note(key, reason)
        return not self._reasons[key]

    def _note(self, key: tuple[object, ...], reason: str) -> None:
        self._reasons[key] = reason
        if reason:
            self.refusals.setdefault(reason)


@cache
def divisors(number: int) -> tuple[int, ...]:
    return tuple(value for value in range(1, number + 1) if number % value == 0)
