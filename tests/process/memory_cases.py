"""What the memory ranks train, and how the planner is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from manifests.memory import POLICIES, MemoryEstimate, Training, estimate_memory
from manifests.models import ModelShape, model_shape
from manifests.placement import Placement
from manifests.schedules import schedule_table
from runner.config.schema import BatchOptions

Policy = Literal["fp32", "bf16", "mixed"]

# About 27 million parameters; the tied embedding is a sixth of them.
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
BATCH = BatchOptions(global_batch=4, microbatch=1, seq_len=16)
# 1 GB of weights in fp32, 4 GB with gradients and moments.
LARGE: Mapping[str, Any] = {**CONFIG, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 21}
LARGE_BATCH = BatchOptions(global_batch=4, microbatch=1, seq_len=64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The ranks' stages, as each stage's number of modules, and the dtype policy."""

    name: str
    policy: Policy
    schedule: Literal["1F1B", "Interleaved1F1B"]
    shares: tuple[int, ...]
    num_ranks: int = 2
    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)
    batch: BatchOptions = BATCH

    @property
    def placement(self) -> Placement:
        return Placement(num_stages=len(self.shares), num_ranks=self.num_ranks)

    @property
    def shape(self) -> ModelShape:
        return model_shape(self.config)

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        ends = tuple(accumulate(self.shares))
        return tuple(self.shape.modules[end - share : end] for end, share in zip(ends, self.shares, strict=True))

    def estimate(self) -> MemoryEstimate:
        table = schedule_table(self.schedule, self.placement, self.batch.num_microbatches)
        training = Training(policy=POLICIES[self.policy], microbatch=self.batch.microbatch, seq_len=self.batch.seq_len)
        return estimate_memory(self.shape, self.stages, table, training)


# 11 modules: embedding, 8 layers, norm, head.
CASES = (
    Case(name="fp32", policy="fp32", schedule="1F1B", shares=(5, 6)),
    Case(name="bf16", policy="bf16", schedule="1F1B", shares=(5, 6)),
    Case(name="mixed", policy="mixed", schedule="1F1B", shares=(5, 6)),
    Case(name="both ends on one rank", policy="fp32", schedule="1F1B", shares=(0, 11)),
    Case(name="both ends on one rank, mixed", policy="mixed", schedule="1F1B", shares=(0, 11)),
    Case(name="interleaved", policy="fp32", schedule="Interleaved1F1B", shares=(2, 3, 3, 3)),
)
# 24 modules; embedding and head are two of them.
ONE_GB = Case(
    name="1 GB", policy="fp32", schedule="1F1B", shares=(6, 6, 6, 6), num_ranks=4, config=LARGE, batch=LARGE_BATCH
)
