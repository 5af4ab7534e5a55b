"""What the memory of a training run depends on: dtypes, microbatches, parallel degrees, activation checkpointing.

# Note [Masks]
With --cp or --document-mask, and in layers whose window is no longer than a row, attention gets a mask of a byte for
each query and key, which every layer keeps in the compute dtype until its backward. transformers then repeats keys and
values for all heads of queries. With --cp, they are those of whole rows, of all heads, or of a part of the heads, whose
output is kept twice, by heads and by parts of rows (ulysses). Recomputed layers need the masks of their stage, one of
each kind. Attention of several operations keeps no mask. Source: `sdpa_attention_forward` and
`_ignore_causal_mask_sdpa` of transformers 5.23; `convert_boolean_attn_mask` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from manifests.errors import Parameter, UsageError
from manifests.models.shape import Work

FP32_NBYTES = 4
Recompute = Literal["none", "full", "selective"] | int  # a number N: every Nth layer
ContextMethod = Literal["gather", "ulysses"]
HostMemory = Literal["fast", "compact"]  # what ranks on CPUs do with freed memory, see Note [Holes] in memory.py


def parse_recompute(text: str) -> Recompute:
    """Read the value of --ac."""
    match text:
        case "none" | "full" | "selective":
            return text
        case _ if text.isascii() and text.isdigit() and int(text):
            return int(text)
    raise UsageError(
        "--ac", f"expected none, full, selective or a number of layers, found {text!r}", code="options.invalid-value"
    )


def check_expert_degree(experts: Mapping[str, int], degree: int, where: str | Parameter) -> None:
    """Check that ranks have as many experts of each module each; `experts` are the numbers by module."""
    if degree == 1:
        return
    if not experts:
        raise UsageError(where, "the model has no experts", f"remove {where}", code="options.ep-architecture")
    for name, count in experts.items():
        if count % degree:
            problem = f"expected a divisor of {count}, the number of experts in {name}, found {degree}"
            raise UsageError(where, problem, code="options.ep-divisor")


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypePolicy:
    """Bytes of an element in the compute dtype, in that of masters, gradients and optimizer state, and of reduction."""

    name: str
    compute: int
    master: int
    reduce: int = FP32_NBYTES

    @property
    def has_masters(self) -> bool:
        return self.master != self.compute

    @property
    def sharded_gradient(self) -> int:
        """Bytes of an element of a gradient that FSDP accumulates."""
        return max(self.master, self.reduce)


POLICIES: Mapping[str, DtypePolicy] = {
    policy.name: policy
    for policy in (
        # Everything in float32: 16 bytes for each parameter.
        DtypePolicy(name="fp32", compute=4, master=4),
        # Everything in bfloat16, the optimizer state too: 8 bytes.
        DtypePolicy(name="bf16", compute=2, master=2, reduce=2),
        # bfloat16 weights; gradients, master weights and optimizer state in float32: 18 bytes.
        DtypePolicy(name="mixed", compute=2, master=4),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Assumptions about a training run. `microbatch` is in sequences of `seq_len` tokens.

    A context-parallel rank has the same part of each; `shard` counts these ranks, too.
    """

    policy: DtypePolicy
    microbatch: int
    seq_len: int
    shard: int = 1  # --dp-shard x --cp
    tensor: int = 1  # --tp
    expert: int = 1  # --ep, a divisor of shard * tensor
    context: int = 1  # --cp, a divisor of shard
    exchanges_heads: bool = False  # --cp-method ulysses
    keeps_documents: bool = False  # --document-mask
    recompute: Recompute = "none"  # --ac
    loss_chunk: int | None = None  # --loss-chunk, in tokens
    host_memory: HostMemory | None = None  # None: on GPUs
    trains: Callable[[str], bool] = lambda fqn: True  # what is frozen has no gradient and no optimizer state
    state_of: Callable[[str], float] = lambda fqn: 2.0  # numbers of optimizer state for each of a tensor's parameters
    frozen_nbytes: int | None = None  # of an element of a frozen weight as files have it; None: as it is computed with
    keeps_average: bool = False  # --ema: of the weights, in float32
    adapters: Mapping[str, int] = field(default_factory=dict, hash=False)  # parameters of each adapter
    dropout_rank: int = 0  # the rank of adapters that have dropout

    @property
    def num_tokens(self) -> int:
        return self.microbatch * self.seq_len // self.context

    def has_mask(self, window: int) -> bool:
        """Return whether attention over a window (0: whole rows) gets a mask, instead of being causal by itself."""
        return self.context > 1 or self.keeps_documents or 0 < window <= self.seq_len

    @property
    def keys_per_query(self) -> int:
        """The elements of a mask for each of a rank's tokens: of ulysses, it has those of the whole row."""
        return self.seq_len * (self.context if self.exchanges_heads else 1)

    @property
    def expert_shard(self) -> int:
        """The number of ranks that shard the same experts."""
        return self.shard * self.tensor // self.expert

    @property
    def is_fused(self) -> bool:
        """Whether the optimizer step and the rounding of bfloat16 products are one operation each."""
        return self.host_memory is None

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP is used: to shard parameters, or for the master weights of tensor-parallel matrices."""
        shards_experts = self.expert > 1 and self.expert_shard > 1
        return self.shard > 1 or shards_experts or (self.tensor > 1 and self.policy.has_masters)


def scores_nbytes(work: Work, training: Training) -> tuple[int, int, int]:
    """Return what attention of several operations keeps for each token, with `--ac selective`, and in its backward.

    `--ac selective` keeps the products of queries and keys, as of all matrix products. A backward has two matrices at a
    time, in float32 at most.
    """
    nbytes, elements, heads = training.policy.compute, work.scores, max(work.scores, work.softmaxes)
    matrices = nbytes * elements + work.softmaxes * (FP32_NBYTES + nbytes * (nbytes < FP32_NBYTES))
    by_key = (matrices, nbytes * heads, 2 * FP32_NBYTES * heads)
    scores, products, temporary = (training.seq_len * number // training.tensor for number in by_key)
    return scores, products, temporary


def masked_elements(work: Work, training: Training, window: int) -> int:
    """Return the elements for each token that attention keeps besides with a mask; see Note [Masks].

    On a GPU in float32 it repeats keys and values without one, too: see Note [Shared keys in float32] in
    runner/models/implementations.py.
    """
    repeated = work.flops_per_key // 2  # the keys and values of a token, for all heads
    if not training.has_mask(window) or not repeated:
        is_repeated = work.keys and training.host_memory is None and training.policy.compute == FP32_NBYTES
        return max(0, repeated - work.keys) // training.tensor if is_repeated else 0
    repeated = repeated * 3 // 2 if training.exchanges_heads else repeated * training.context
    mask = 0 if work.scores or work.softmaxes else training.keys_per_query
    return (repeated - work.keys) // training.tensor + mask
