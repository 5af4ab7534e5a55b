"""Memory of training on each stage and rank: weights, gradients, optimizer state, activations, temporary memory.

One estimate, for `reshard plan` and for the runner's own figures.

# Note [Memory of a rank]
A stage's parameters are divided over tensor-parallel ranks, except those of norms and routers; with expert parallelism,
those of experts over its ranks instead, and as many tokens are expected to arrive at a rank as leave it. FSDP gathers a
stage's parameters and accumulates their gradients whole; what it divides is the weights, gradients and optimizer state
of the optimizer step. A backward frees the activations of one module after the other, so the temporary memory of a
module comes on top of the activations of those before it.

A backward in two parts frees nothing in the first, I: until the second, W, there are also the activations that I has
recomputed, and the gradients of what every weight gives. Only the loss is done. Of the first stage, W does it all.

A frozen parameter has its weight alone, in the dtype of computation. Its activations are counted as if it were trained.
If files have it in another dtype, that is what FSDP gathers from, and otherwise there is a copy: in host memory, but
for the parts of tensor- and expert-parallel ranks.
Experts with adapters are added to the products of these in each forward, and their sums kept like its activations.
With dropout, each adapter of another module keeps an input of its own, and a mask: on GPUs of a byte for each element.

A tensor that another rank sends is in memory from its receive until the backward of its microbatch: a stage's input,
which is then not counted among the activations as well, and the gradient of its output. What a stage sends is in
memory until it has arrived: one result, and the one computed meanwhile; see Note [Waiting for sends] in
runner/pipeline/torch_runtime.py.

On the CPU, oneDNN computes a bfloat16 matrix product in a float32 buffer of its result's size, and then rounds it (2.99
times the result, measured with torch 2.13). The largest of a module's is the gradient of a weight.

# Note [Holes]
On CPUs, malloc keeps freed memory. The optimizer's state is allocated when the activations of the first step are freed,
and takes their place; the next step needs other memory for its own. With FSDP, the same is true of the weights and
gradients that a step gathers and frees. `compact` ranks return this memory to the system, `fast` ones do not. Plans
without a policy are of GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from manifests.brief import brief
from manifests.models import ModelShape, Work, module_of
from manifests.models.adapters import kept_for_adapters
from manifests.models.mtp import count_borrowed, layer_number, work_where_kept
from manifests.models.parts import is_shared, shards_of, sizes_of
from manifests.models.training import FP32_NBYTES, POLICIES, Training, masked_elements, scores_nbytes
from manifests.placement import Placement
from manifests.schedules.actions import Table, actions_of
from manifests.schedules.liveness import num_remote_neighbors, peak_held, peak_held_by_stage, peak_received
from manifests.schedules.lowering import lower

MOST_IN_TRANSIT = 2  # results of a stage in one direction that have been computed, and of which one is in transit
_Sharded = tuple[int, int]  # parameters of a tensor on a rank, and the ranks over which FSDP shards these


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory in use at the peak of a step; `state` is what is in use at any time.

    Units: bytes.
    Not included: buffers such as the rotary cache, the network's own, and fragmentation of a GPU's memory.
    """

    weights: int
    gradients: int = 0
    optimizer: int = 0  # its state, and what FSDP keeps sharded or a master copy
    activations: int = 0
    receive_buffers: int = 0  # activations and gradients from other ranks, and those in transit to them
    temporary: int = 0  # of the operation or the optimizer step that needs the most besides; and Note [Holes]

    @property
    def state(self) -> int:
        """What the rank has at any time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.activations + self.receive_buffers + self.temporary

    def with_holes(self, *, is_gathered: bool) -> Memory:
        """Return the memory where malloc keeps what is freed, by FSDP too; see Note [Holes]."""
        gathered = self.weights + self.gradients if is_gathered else 0
        holes = min(self.total - self.state, self.optimizer) + gathered
        return replace(self, temporary=self.temporary + holes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Memory by stage and by rank.

    A rank's stages need not reach their activation peaks at the same time, so a rank's peak may be less than their sum.
    """

    stages: tuple[Memory, ...]
    ranks: tuple[Memory, ...]

    __repr__ = brief


def estimate_memory(
    shape: ModelShape, stages: Sequence[Sequence[str]], table: Table, training: Training
) -> MemoryEstimate:
    """Estimate the memory of each stage, a list of modules (like ones by one name), and of each rank on a schedule.

    Tied parameters on one rank are one parameter with a gradient per name; each other rank has a copy.
    Activations: see `manifests.models.shape.Work`, for as many microbatches as the schedule has in flight.
    Receive buffers: for as many as it has received, see `manifests.schedules.liveness.peak_received`.
    """
    placement, policy = table.placement, training.policy
    sizes = sizes_of(shape, training)
    costs = _costs_of(shape, training, sizes)
    split = {
        action.stage for steps in table.ranks for step in steps for action in actions_of(step) if action.kind == "I"
    }
    split.discard(0)
    hidden = training.num_tokens * shape.hidden_size
    boundary = hidden * (FP32_NBYTES if shape.hands_on_float32 else policy.compute)
    received, in_transit = peak_received(lower(table)), min(MOST_IN_TRANSIT, table.num_microbatches)
    sent = [in_transit * num_remote_neighbors(placement, stage) for stage in range(placement.num_stages)]
    per_microbatch, delayed = [], []  # bytes, by stage
    for stage, modules in enumerate(stages):
        is_received = stage > 0 and placement.rank_of(stage - 1) != placement.rank_of(stage)
        counted_twice = hidden * policy.compute if is_received and modules and costs[modules[0]].saves_input else 0
        layers = [module for module in modules if layer_number(shape.architecture, module) is not None]
        windows = {shape.windows.get(module, 0) for module in layers}  # a mask of each
        num_masks = sum(map(training.has_mask, windows)) if training.recompute != "none" else 0
        masks = num_masks * training.num_tokens * training.keys_per_query
        per_microbatch.append(sum(costs[module].activations for module in modules) + masks - counted_twice)
        delayed.append(sum(costs[module].delayed for module in modules) if stage in split else 0)
    peaks = peak_held_by_stage(table, per_microbatch, delayed)
    followers = _followers(shape, stages, placement)
    by_stage, temporary, in_step = [], [], []
    for stage, modules in enumerate(stages):
        led = {
            module: [
                (n * shape.copies.get(fqn, 1), shards_of(fqn, training))
                for fqn, n in sizes[module].items()
                if fqn not in followers and training.trains(fqn)
            ]
            for module in modules
        }
        weights, gradients, optimizer = _state_nbytes(shape, training, sizes, modules, followers)
        on_stage = [costs[module] for module in modules]
        temporary.append((_temporary(on_stage, is_split=False), _temporary(on_stage, is_split=stage in split)))
        in_step.append(_step_nbytes(shape, led, training))
        borrowed, embeds = count_borrowed(shape, modules, sizes), placement.rank_of(stage) == placement.rank_of(0)
        by_stage.append(
            Memory(
                weights=weights + (0 if embeds else borrowed * policy.compute),
                gradients=gradients + borrowed * (policy.sharded_gradient if training.is_sharded else policy.master),
                optimizer=optimizer,
                activations=peaks[stage],
                receive_buffers=boundary * (received.stages[stage] + sent[stage]),
                # The optimizer steps when no activations are left.
                temporary=max(temporary[stage][1], in_step[stage] - peaks[stage]),
            )
        )
    by_rank = []
    with_temporary = peak_held(table, per_microbatch, delayed, temporary)
    for rank, activations in enumerate(peak_held(table, per_microbatch, delayed)):
        on_rank = placement.stages_on(rank)
        peak = max(with_temporary[rank], max((in_step[stage] for stage in on_rank), default=0))
        parts = [by_stage[stage] for stage in on_rank]
        by_rank.append(
            Memory(
                weights=sum(part.weights for part in parts),
                gradients=sum(part.gradients for part in parts),
                optimizer=sum(part.optimizer for part in parts),
                activations=activations,
                receive_buffers=boundary * (received.ranks[rank] + sum(sent[stage] for stage in on_rank)),
                temporary=peak - activations,
            )
        )
    if training.host_memory == "fast":
        by_stage, by_rank = (
            [memory.with_holes(is_gathered=training.is_sharded) for memory in rows] for rows in (by_stage, by_rank)
        )
    return MemoryEstimate(stages=tuple(by_stage), ranks=tuple(by_rank))


def memory_of(shape: ModelShape, training: Training, in_flight: int) -> dict[str, int]:
    """Return the memory of each module on a stage with `in_flight` microbatches, without receive buffers and temporary
    memory.

    A layout solver sums these costs, so `in_flight` must be one number: the largest of any stage keeps every rank
    within its limit.
    """
    sizes = sizes_of(shape, training)
    costs = _costs_of(shape, training, sizes)
    return {
        module: sum(_state_nbytes(shape, training, sizes, [module])) + in_flight * costs[module].activations
        for module in sizes
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cost:
    activations: int
    temporary: int  # in its backward, without what that recomputes
    recomputed: int = 0  # activations besides
    gradients: int = 0  # of what its weights give
    is_loss: bool = False  # whether what it keeps is done with when its gradient is known
    saves_input: bool = False  # whether its input is part of what it keeps

    @property
    def delayed(self) -> int:
        """Bytes besides what it keeps between the parts of a backward in two."""
        return self.recomputed + self.gradients - (self.activations if self.is_loss else 0)


def _costs_of(shape: ModelShape, training: Training, sizes: Mapping[str, Mapping[str, int]]) -> dict[str, _Cost]:
    costs = {}
    for module, work in work_where_kept(shape, keeps_logits=training.loss_chunk is None).items():
        largest = max((count for fqn, count in sizes[module].items() if training.trains(fqn)), default=0)
        if (number := layer_number(shape.architecture, module)) is not None:
            cost = _layer_cost(work, shape.hidden_size, training, number, largest, shape.windows.get(module, 0))
            costs[module] = _with_adapters(cost, *kept_for_adapters(shape, sizes[module], training), training)
        else:
            costs[module] = _outer_cost(work, training, largest)
    return costs


def _layer_cost(work: Work, width: int, training: Training, number: int, largest: int, window: int) -> _Cost:
    """Return the cost of a decoder layer, with activation checkpointing as asked for.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", 4.2: what norms
    take and give is on every tensor-parallel rank, the rest is divided.
    """
    tokens, nbytes, every = training.num_tokens, training.policy.compute, training.recompute
    statistics = FP32_NBYTES * (work.saved_fp32 - work.whole_fp32) // training.tensor
    rounded = nbytes * _divided(work.saved, work.whole, training.tensor)
    scores, products, of_scores = scores_nbytes(work, training)
    masked = nbytes * masked_elements(work, training, window)
    saved = rounded + statistics + FP32_NBYTES * work.whole_fp32 + masked + scores
    gradients = rounded // 4  # of what an MLP's second matrix takes
    temporary = max(tokens * gradients + _weight_gradient(work, largest, training), tokens * of_scores)
    given = work.products - work.flops_per_key // 4 + work.normed  # attention has no weights
    activations = saved
    if every != "none" and not (isinstance(every, int) and number % every):
        activations = nbytes * width  # its input
        if every == "selective":
            # And attention's sums, which are few.
            activations += nbytes * _divided(work.products, work.normed, training.tensor) + products
        activations = min(activations, saved)
    return _Cost(
        activations=tokens * activations,
        temporary=temporary,
        recomputed=tokens * (saved - activations),
        gradients=tokens * nbytes * _divided(given, 2 * work.normed, training.tensor),
        saves_input=activations < saved or _norms_save_input(work, training),
    )


def _with_adapters(cost: _Cost, sums: int, inputs: int, training: Training) -> _Cost:
    """Return the cost of a layer with bytes of sums and inputs; see Note [Memory of a rank].

    The backward also has the gradient of one of the two tensors of sums, when it may be done with the other.
    """
    is_recomputed = cost.recomputed > 0
    saved = sums * (not is_recomputed or training.recompute == "selective") + inputs * (not is_recomputed)
    return replace(
        cost,
        activations=cost.activations + saved,
        recomputed=cost.recomputed + sums + inputs - saved,
        temporary=cost.temporary + sums // 2,
    )


def _outer_cost(work: Work, training: Training, largest: int) -> _Cost:
    """Return the cost of an embedding, a norm, or a head with the loss after it.

    Of a head, logits are whole on every tensor-parallel rank. In its backward, log-probabilities have a gradient, and
    their input another; only then comes the weight's. With chunks, autograd adds a chunk's gradient of the weight to
    the sum of those before, out of place.
    """
    nbytes, tokens = training.policy.compute, training.num_tokens
    logits, fp32 = nbytes * work.saved, FP32_NBYTES * work.saved_fp32
    weight = _weight_gradient(work, largest, training)
    if work.normed or not work.saved_fp32:
        activations = tokens * (logits + fp32)
        is_norm = work.normed > 0 and _norms_save_input(work, training)
        return _Cost(
            activations=activations, temporary=weight, gradients=tokens * nbytes * work.normed, saves_input=is_norm
        )
    if training.loss_chunk is None:
        temporary = max(2 * tokens * fp32, weight + tokens * (logits - fp32))
        return _Cost(activations=tokens * (logits + fp32), temporary=temporary, gradients=tokens * logits, is_loss=True)
    tokens = min(training.loss_chunk, tokens)
    return _Cost(activations=0, temporary=tokens * (logits + 3 * fp32) + weight + 2 * nbytes * largest)


def _norms_save_input(work: Work, training: Training) -> bool:
    """Whether norms keep their input as it is, not a float32 copy of it."""
    return not work.whole_fp32 or training.policy.compute == FP32_NBYTES


def _weight_gradient(work: Work, largest: int, training: Training) -> int:
    """Return the bytes of a microbatch's gradient of a weight, until it is accumulated; see Note [Memory of a rank]."""
    policy = training.policy
    is_rounded = bool(work.flops) and not training.is_fused and policy.compute < FP32_NBYTES
    besides = max(policy.master if policy.has_masters else 0, FP32_NBYTES if is_rounded else 0)
    return largest * (policy.compute + besides)


def _temporary(costs: Sequence[_Cost], *, is_split: bool) -> int:
    """Return the temporary memory of a stage's backward beyond the activations of all its modules.

    If it is split, beyond what is there between its parts as well: of the modules before, that is still to come.
    """
    most = later = 0
    if is_split:
        for cost in costs:
            most, later = max(most, cost.temporary - later), later + max(0, cost.delayed)
        return most + sum(max(0, -cost.delayed) for cost in costs)
    for cost in reversed(costs):
        most, later = max(most, cost.temporary + cost.recomputed - later), later + cost.activations
    return most


def _step_nbytes(shape: ModelShape, sizes: Mapping[str, Sequence[_Sharded]], training: Training) -> int:
    """Return the temporary memory of reducing a stage's gradients and of its optimizer step.

    `sizes` are the tensors of each module.
    """
    groups = Counter[tuple[str, int]]()  # FSDP's are the layers, experts apart from the rest, and everything else
    for module, tensors in sizes.items():
        group = "" if layer_number(shape.architecture, module) is None else module
        for count, shards in tensors:
            groups[group, shards] += count
    reduced = stepped = 0
    if training.is_sharded:
        reduced = max((count + count // shards for (_, shards), count in groups.items() if shards > 1), default=0)
    if not training.is_fused:
        stepped = max((count // shards for tensors in sizes.values() for count, shards in tensors), default=0)
    return max(training.policy.reduce * reduced, 2 * training.policy.master * stepped)


def _state_nbytes(
    shape: ModelShape, training: Training, sizes: Mapping[str, Mapping[str, int]], modules: Sequence[str],
    followers: frozenset[str] = frozenset(),
) -> tuple[int, int, int]:  # fmt: skip
    """Return the bytes of weights, gradients and optimizer state of modules, of which several may have one name.

    `followers` share the weight of another tensor.
    """
    numbers, copies = Counter(modules), shape.copies
    owned = [(fqn, n, numbers[module] * copies.get(fqn, 1)) for module in numbers for fqn, n in sizes[module].items()]
    suffixes = shape.float32_suffixes
    weights = gradients = optimizer = 0
    for policy, is_exact in ((training.policy, False), (POLICIES["fp32"], True)):
        average = FP32_NBYTES / policy.master if training.keeps_average else 0.0
        by_shards, state, num_params = Counter[int](), Counter[int](), 0
        for fqn, count, times in (tensor for tensor in owned if tensor[0].endswith(suffixes) is is_exact):
            trains = training.trains(fqn)
            num_params += times * count if trains else 0
            if fqn in followers:
                continue
            weights += times * count * policy.compute
            shards = shards_of(fqn, training)
            if trains:
                by_shards[shards] += times * count
                state[shards] += times * round(count * (training.state_of(fqn) + average))
            elif training.is_sharded:
                optimizer += times * (count * (training.frozen_nbytes or policy.compute) // shards)  # gathered from
            elif training.frozen_nbytes not in (None, policy.compute):
                is_here = not training.is_fused or is_shared(fqn, shape, training)
                optimizer += times * count * training.frozen_nbytes * is_here
        if training.is_sharded:  # see Note [Memory of a rank]
            gradients += num_params * policy.sharded_gradient
            optimizer += sum((count + state[shards]) * policy.master // shards for shards, count in by_shards.items())
        else:
            gradients += num_params * policy.master
            optimizer += (state.total() + by_shards.total() * policy.has_masters) * policy.master
    return weights, gradients, optimizer


def _divided(elements: int, whole: int, tensor: int) -> int:
    """Divide elements over tensor-parallel ranks, except for those that each of them has."""
    whole = min(whole, elements)
    return whole + (elements - whole) // tensor


def _followers(shape: ModelShape, stages: Sequence[Sequence[str]], placement: Placement) -> frozenset[str]:
    """Return the tied tensors that share the weight of another on their rank."""
    rank_of = {module: placement.rank_of(stage) for stage, modules in enumerate(stages) for module in modules}
    followers = []
    for group in shape.ties:
        modules = [module_of(fqn, rank_of) for fqn in group]
        ranks = [rank_of[module] for module in modules if module is not None]
        followers += [fqn for position, fqn in enumerate(group) if ranks[position] in ranks[:position]]
    return frozenset(followers)
