"""Memory of training on each stage and rank: weights, gradients, optimizer state, activations, receive buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from manifests.models import ModelShape, module_of
from manifests.placement import Placement
from manifests.schedules import Table, peak_held

__all__ = ["POLICIES", "DtypePolicy", "Memory", "MemoryEstimate", "Training", "estimate_memory", "memory_of"]

FP32_NBYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypePolicy:
    """Bytes per parameter, and per element of an activation, of training with AdamW."""

    name: str
    weights: int
    gradients: int
    optimizer: int  # exp_avg, exp_avg_sq, and a master copy where there is one
    compute: int

    @property
    def nbytes_per_param(self) -> int:
        return self.weights + self.gradients + self.optimizer


POLICIES: Mapping[str, DtypePolicy] = {
    policy.name: policy
    for policy in (
        # Everything in float32: 16 bytes for each parameter.
        DtypePolicy(name="fp32", weights=4, gradients=4, optimizer=4 + 4, compute=4),
        # Everything in bfloat16, the optimizer state too: 8 bytes.
        DtypePolicy(name="bf16", weights=2, gradients=2, optimizer=2 + 2, compute=2),
        # bfloat16 weights; gradients, master weights and optimizer state in float32: 18 bytes.
        DtypePolicy(name="mixed", weights=2, gradients=4, optimizer=4 + 4 + 4, compute=2),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Assumptions about a training run. `microbatch` is in sequences of `seq_len` tokens."""

    policy: DtypePolicy
    microbatch: int
    seq_len: int

    @property
    def num_tokens(self) -> int:
        return self.microbatch * self.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes in use at the end of a step's last backward pass; of activations, the peak.

    Not included: buffers such as the rotary cache, temporary memory of operations, and allocator fragmentation.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    wires: int = 0  # buffers that torch's pipelining receives activations and gradients into

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.wires


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Memory by stage and by rank.

    A rank's stages need not reach their activation peaks at the same time, so a rank's peak may be less than their sum.
    """

    stages: tuple[Memory, ...]
    ranks: tuple[Memory, ...]


def estimate_memory(
    shape: ModelShape, stages: Sequence[Sequence[str]], table: Table, training: Training
) -> MemoryEstimate:
    """Estimate the memory of each stage, a list of modules, and of each rank when training on a schedule.

    Tied parameters on one rank are one parameter with a gradient per name; each other rank has a copy.
    Activations: see `manifests.models.shape.Work`, for as many microbatches as the schedule has in flight.
    Receive buffers (`wires`): torch 2.13 keeps one per microbatch of a step for the input of each stage but the
    first, and one for the output gradient of each stage but the last.

    Source: torch 2.13, `distributed/pipelining/stage.py`, `_setup_forward_recv_info`,
        `_create_grad_recv_info`.
    """
    placement, policy = table.placement, training.policy
    kept = [sum(_activation_nbytes(shape, module, training) for module in modules) for modules in stages]
    peaks = _peak_by_stage(table, kept)
    fqns_of, followers = shape.by_module(), _followers(shape, stages, placement)
    wire = table.num_microbatches * training.num_tokens * shape.hidden_size * policy.compute
    by_stage = []
    for stage, modules in enumerate(stages):
        fqns = [fqn for module in modules for fqn in fqns_of[module]]
        num_params = sum(map(shape.count_params, fqns))
        led = num_params - sum(shape.count_params(fqn) for fqn in fqns if fqn in followers)
        by_stage.append(
            Memory(
                weights=led * policy.weights,
                gradients=num_params * policy.gradients,
                optimizer=led * policy.optimizer,
                activations=peaks[stage],
                wires=wire * ((stage > 0) + (stage < placement.num_stages - 1)),
            )
        )
    at_once = peak_held(table, kept)
    by_rank = [
        _sum((by_stage[stage] for stage in placement.stages_on(rank)), activations=at_once[rank])
        for rank in range(placement.num_ranks)
    ]
    return MemoryEstimate(stages=tuple(by_stage), ranks=tuple(by_rank))


def memory_of(shape: ModelShape, training: Training, in_flight: int) -> dict[str, int]:
    """Return the memory of each module on a stage with `in_flight` microbatches, without receive buffers.

    A layout solver sums these costs, so `in_flight` must be one number: the largest of any stage keeps every rank
    within its limit.
    """
    per_param = training.policy.nbytes_per_param
    return {
        module: per_param * sum(map(shape.count_params, fqns)) + in_flight * _activation_nbytes(shape, module, training)
        for module, fqns in shape.by_module().items()
    }


def _activation_nbytes(shape: ModelShape, module: str, training: Training) -> int:
    """Return the bytes of activations that a module keeps per microbatch."""
    work = shape.work[module]
    return training.num_tokens * (work.saved * training.policy.compute + work.saved_fp32 * FP32_NBYTES)


def _peak_by_stage(table: Table, sizes: Sequence[int]) -> list[int]:
    """Return the activation peak of each stage: one pass over the table for each stage of a rank."""
    placement, peaks = table.placement, [0] * len(sizes)
    for virtual in range(placement.num_virtual):
        own = [size if placement.virtual_of(stage) == virtual else 0 for stage, size in enumerate(sizes)]
        for rank, peak in enumerate(peak_held(table, own)):
            peaks[placement.stages_on(rank)[virtual]] = peak
    return peaks


def _followers(shape: ModelShape, stages: Sequence[Sequence[str]], placement: Placement) -> frozenset[str]:
    """Return the tied tensors that share the weight of another on their rank."""
    rank_of = {module: placement.rank_of(stage) for stage, modules in enumerate(stages) for module in modules}
    followers = []
    for group in shape.ties:
        modules = [module_of(fqn, rank_of) for fqn in group]
        ranks = [rank_of[module] for module in modules if module is not None]
        followers += [fqn for position, fqn in enumerate(group) if ranks[position] in ranks[:position]]
    return frozenset(followers)


def _sum(parts: Iterable[Memory], *, activations: int) -> Memory:
    weights, gradients, optimizer, wires = 0, 0, 0, 0
    for part in parts:
        weights, gradients = weights + part.weights, gradients + part.gradients
        optimizer, wires = optimizer + part.optimizer, wires + part.wires
    return Memory(weights=weights, gradients=gradients, optimizer=optimizer, activations=activations, wires=wires)
