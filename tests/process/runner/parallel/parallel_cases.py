"""What ranks that share stages train: models, how they are cut, and which of them go on from others' checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

VOCAB_SIZE = 96
# Some of whose gradients are float32, which FSDP rounds by microbatch and one rank does not: AdamW makes much of it.
ROUNDED = ("BeamForCausalLM", "Mamba2ForCausalLM", "OlmoHybridForCausalLM")
TWO_DTYPES = (
    "BailingHybridForCausalLM", "Ernie4_5_MoeForCausalLM", "FalconMambaForCausalLM", "FlintForCausalLM",
    "HunYuanMoEV1ForCausalLM", "InklingForCausalLM", "MambaForCausalLM", "OpenAIGPTLMHeadModel",
    "XGLMForCausalLM", *ROUNDED,
)  # fmt: skip
_TIED = {"tie_word_embeddings": True}
# What tensor parallelism cuts must divide: it has models of its own.
_EVEN = ("even-qwen3-moe", "even-deepseek-v3", "even-deepseek-v3-plain", "even-gpt-oss")
_ALL = ("all-qwen3-moe", "all-deepseek-v3", "all-gpt-oss")
# A config of tests/data, and what is changed of it. Numbers that no number of ranks divides are here on purpose,
# of words, of hidden units and of experts; so is an attention of one head, whose sinks are one number. Padding tokens,
# whose rows the embedding does not train, are in the rows of one tensor-parallel rank or of the other.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tied": ("tiny-llama", {**_TIED, "pad_token_id": 90}),
    "untied": ("tiny-llama", {"pad_token_id": 5}),
    "odd": ("tiny-llama", {"vocab_size": VOCAB_SIZE + 1, "intermediate_size": 82}),
    "qwen3": ("tiny-qwen3", {"head_dim": 8}),
    "mistral": ("tiny-mistral", {"sliding_window": 16}),
    "qwen3-moe": ("tiny-qwen3-moe", {**_TIED, "num_experts": 5, "vocab_size": VOCAB_SIZE + 1}),
    "deepseek-v3": (
        "tiny-deepseek-v3",
        {"n_routed_experts": 9, "n_group": 3, "topk_group": 2, "kv_lora_rank": 15, "q_lora_rank": 23},
    ),
    "gpt-oss": (
        "tiny-gpt-oss",
        {"num_local_experts": 5, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": VOCAB_SIZE + 1},
    ),
    "gpt2": ("tiny-gpt2", {**_TIED, "vocab_size": VOCAB_SIZE + 1}),
    "gemma2": ("tiny-gemma2", _TIED),
    "mixtral": ("tiny-mixtral", {"num_local_experts": 3}),
    "gemma3": ("tiny-gemma3", _TIED),
    "mpt": ("tiny-mpt", _TIED),
    "opt": ("tiny-opt", {**_TIED, "word_embed_proj_dim": 16}),
    "phi3": ("tiny-phi3", {}),
    "qwen2": ("tiny-qwen2", _TIED),
    "falcon": ("tiny-falcon", {"bias": True}),
    "even-qwen3-moe": ("tiny-qwen3-moe", {**_TIED, "pad_token_id": 5}),
    "even-deepseek-v3": ("tiny-deepseek-v3", {"pad_token_id": 90}),
    "even-deepseek-v3-plain": ("tiny-deepseek-v3", {"q_lora_rank": None, "n_shared_experts": 2}),
    "even-gpt-oss": ("tiny-gpt-oss", {}),
    # Every token goes to all experts: how sums are rounded does not decide which ones. Of two ranks in bfloat16, rows
    # of the first ones are no multiples of 16 bytes, so torch does not multiply them in groups.
    "all-qwen3-moe": ("tiny-qwen3-moe", {"num_experts_per_tok": 8}),
    "all-deepseek-v3": (
        "tiny-deepseek-v3",
        {"num_experts_per_tok": 8, "topk_group": 2, "moe_intermediate_size": 32},
    ),
    "all-gpt-oss": ("tiny-gpt-oss", {"num_experts_per_tok": 8}),
    "phi": ("tiny-phi", {"vocab_size": VOCAB_SIZE + 1}),  # whose head has a bias
    # Of the catalogue, with two dtypes in bfloat16: routers, recurrences, hidden states, and computed buffers.
    **{name: (name, {}) for name in TWO_DTYPES},
}
LAYOUTS = ("pp=1", "pp=2", "pp=4", "pp=2,vpp=2", "pp=2,vpp=2,style=v")
_DATA_TOLERANCE, _TENSOR_TOLERANCE = 1e-6, 5e-6  # of gradients, relative
_MIXED_TOLERANCES = 5e-3, 5e-2  # 2^-8 is half a digit of bf16, in which tensor-parallel ranks add up


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run of two steps, or of the second one alone, from what another run saved after its first."""

    model: str
    layout: str = "pp=2"
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    flags: tuple[str, ...] = ()
    origin: Case | None = None

    @property
    def name(self) -> str:
        shape = f"{self.replicate}x{self.shard}x{self.tensor}"
        parts = (self.model, self.layout, shape, *(flag.strip("-") for flag in self.flags))
        return "-".join((*parts, *(("from", self.origin.name) if self.origin else ())))

    @property
    def packed(self) -> str:
        return f"{self.model}-{self.layout}"

    @property
    def reference(self) -> Case:
        """One rank that computes in the same dtypes."""
        return Case(model=self.model, layout="pp=1", flags=MIXED if self.is_mixed else ())

    @property
    def is_mixed(self) -> bool:
        return self.flags[: len(MIXED)] == MIXED

    @property
    def tolerance(self) -> float:
        data, tensor = _MIXED_TOLERANCES if self.is_mixed else (_DATA_TOLERANCE, _TENSOR_TOLERANCE)
        if self.model in ROUNDED:
            data *= 2  # some of their rounded gradients cancel out
        return data if self.tensor == 1 and "--compile" not in self.flags else tensor  # compiled, sums are fused

    @property
    def args(self) -> list[str]:
        flags = ("--dp-replicate", self.replicate, "--dp-shard", self.shard, "--tp", self.tensor, *self.flags)
        return [str(flag) for flag in flags]

    @property
    def is_same_run(self) -> bool:
        """Whether it goes on as its origin did, bit for bit."""
        return self.origin is not None and replace(self, origin=None) == self.origin


def _families() -> tuple[Case, ...]:
    """Give each family in shards, in copies of shards, and gone on from shards by shards or by copies in turn."""
    cases = []
    for number, model in enumerate(model for model in tuple(MODELS)[3:] if model not in _EVEN + _ALL + TWO_DTYPES):
        sharded = Case(model=model, shard=2)
        resumed = sharded if number % 2 else Case(model=model, replicate=2)
        cases += [sharded, Case(model=model, layout="pp=1", replicate=2, shard=2), replace(resumed, origin=sharded)]
    return tuple(cases)


MIXED = ("--dtype", "bf16", "--master-dtype", "fp32")
_ZBV = ("--schedule", "ZBVZeroBubble")
_GPT_OSS = Case(model="gpt-oss", shard=2)
_DEEPSEEK = Case(model="even-deepseek-v3", tensor=2)
_LOOP = Case(model="tied", layout="pp=4")
_V = Case(model="tied", layout="pp=2,vpp=2,style=v", shard=2, flags=_ZBV)
NORMAL = (
    Case(model="tied", replicate=2),
    Case(model="tied", shard=2),
    Case(model="untied", shard=2, flags=("--loading", "broadcast")),
    Case(model="tied", tensor=2),
    _LOOP,
    _V,
    replace(_LOOP, origin=_V),
    Case(model="tied", tensor=2, origin=_V),
    Case(model="odd", layout="pp=1", shard=4),
    _GPT_OSS,
)
# tests/matrix.py has every pair of features, of sizes that all numbers of ranks divide.
SLOW_4 = tuple(
    case
    for case in (
        Case(model="qwen3", tensor=2),  # its norms of heads have seen the heads of one rank
        replace(_V, origin=_LOOP),
        Case(model="tied", replicate=2, origin=_LOOP),
        Case(model="tied", shard=2, flags=("--compile",)),
        Case(model="untied", layout="pp=1", replicate=2, tensor=2, flags=("--loading", "broadcast")),
        *(Case(model=model, tensor=2) for model in _EVEN),
        Case(model="even-deepseek-v3", shard=2, origin=_DEEPSEEK),
        replace(_DEEPSEEK, origin=_DEEPSEEK),
        Case(model="even-qwen3-moe", tensor=2, flags=("--loading", "broadcast")),
        *_families(),
        Case(model="deepseek-v3", layout="pp=2,vpp=2,style=v", shard=2, flags=("--schedule", "DualPipeV")),
        Case(model="gpt-oss", layout="pp=2,vpp=2", shard=2, flags=("--schedule", "InterleavedZeroBubble")),
        Case(model="deepseek-v3", shard=2, flags=("--loading", "broadcast")),
        Case(model="mixtral", shard=2, flags=("--loading", "broadcast")),
    )
    if case not in NORMAL
)
_MIXED = Case(model="untied", shard=2, flags=MIXED)
SLOW_MIXED = (
    _MIXED,
    replace(_MIXED, origin=_MIXED),
    Case(model="untied", replicate=2, flags=MIXED, origin=_MIXED),
    Case(model="untied", layout="pp=1", shard=4, flags=MIXED, origin=_MIXED),
    Case(model="untied", layout="pp=4", flags=MIXED, origin=_MIXED),
    Case(model=_ALL[0], tensor=2, flags=MIXED),
    *(Case(model=model, layout="pp=1", shard=2, tensor=2, flags=MIXED) for model in _ALL),
    *(Case(model=model, shard=2, flags=MIXED) for model in TWO_DTYPES),
)
