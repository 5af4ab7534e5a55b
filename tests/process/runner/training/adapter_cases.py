"""Runs that train adapters: architectures, layouts, and flags; and the batches of their steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import reshard
from runner.data.sequences import Batch
from runner.proof.reference import draw_rows
from runner.proof.stages import LENGTH

STEPS, ROWS, VOCAB, LR = 2, 4, 64, 1e-2
_WIDTHS = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
# Experts of sizes that are no multiples of 8 are computed one after the other, in any dtype.
FIELDS = {
    "LlamaForCausalLM": {**_WIDTHS, "intermediate_size": 48, "tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": {**_WIDTHS, "intermediate_size": 48, "moe_intermediate_size": 12, "num_experts": 4,
                            "num_experts_per_tok": 2},
    "GptOssForCausalLM": {**_WIDTHS, "intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    "MixtralForCausalLM": {**_WIDTHS, "intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_ATTENTION = ALL[:4]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@dataclass(frozen=True)
class Case:
    """A run of so many ranks; `modules` and `experts` are peft's target_modules and target_parameters."""

    name: str
    architecture: str
    layout: str
    num_ranks: int
    flags: tuple[str, ...] = ()
    dtype: str = "fp64"
    modules: tuple[str, ...] | str = tuple(_ATTENTION)
    experts: bool = False
    has_rslora: bool = False

    def folder(self, place: Path, what: str) -> Path:
        return place / f"{self.name}-{what}"


LLAMA, QWEN, GPT, MIXTRAL = FIELDS
NORMAL = (
    Case("plain", LLAMA, "pp=2", 2, modules=tuple(ALL)),
    Case("interleaved", LLAMA, "pp=2,vpp=2", 2, ("--schedule", "InterleavedZeroBubble"), has_rslora=True),
    Case("v", QWEN, "pp=2,vpp=2,style=v", 2, ("--schedule", "ZBVZeroBubble"), experts=True),
    Case("float32", GPT, "pp=2", 2, dtype="fp32", experts=True),
    Case("shard", QWEN, "pp=1", 2, ("--dp-shard", "2"), experts=True),
    Case("replicate", LLAMA, "pp=1", 2, ("--dp-replicate", "2"), modules=("q_proj",)),
    Case("tp", LLAMA, "pp=1", 2, ("--tp", "2"), modules=tuple(ALL)),
    Case("tp_experts", QWEN, "pp=1", 2, ("--tp", "2"), experts=True),
    Case("ep_experts", QWEN, "pp=1", 2, ("--dp-shard", "2", "--ep", "2"), experts=True),
    Case(
        "frozen_first",
        LLAMA,
        "pp=2,vpp=2,style=v",
        2,
        ("--schedule", "ZBVZeroBubble"),
        modules=r".*layers\.3\..*q_proj",
    ),
)
SLOW = (
    Case("bubble", MIXTRAL, "pp=2", 2, ("--schedule", "GPipe", "--ac", "full"), experts=True),
    Case("frozen_last", LLAMA, "pp=2", 2, modules=r".*layers\.0\..*q_proj"),
    Case("alone", GPT, "pp=1", 1, experts=True),
    Case("alone_tied", LLAMA, "pp=1", 1, modules=tuple(ALL)),
    Case("four", LLAMA, "pp=4", 4, modules=tuple(ALL)),
    Case("four_experts", QWEN, "pp=2", 4, ("--dp-shard", "2"), experts=True),
    Case("four_ep", GPT, "pp=1", 4, ("--dp-shard", "2", "--tp", "2", "--ep", "2"), experts=True),
    Case("four_tp", MIXTRAL, "pp=2", 4, ("--tp", "2"), dtype="fp32", experts=True),  # its scores are float32
    Case("four_stages", QWEN, "pp=4", 4, experts=True),
    Case("four_mixed", MIXTRAL, "pp=2", 4, ("--dp-replicate", "2"), dtype="fp32", experts=True),
)  # fmt: skip


def make(case: Case, place: Path) -> None:
    """Save a model and an adapter with random values by peft, and pack the model."""
    from peft import LoraConfig, get_peft_model

    kind = getattr(transformers, case.architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**FIELDS[case.architecture]))
    model.save_pretrained(case.folder(place, "model"))
    reshard.pack(case.folder(place, "model"), case.folder(place, "packed"), case.layout)
    modules = case.modules if isinstance(case.modules, str) else list(case.modules)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=modules, target_parameters=EXPERTS if case.experts else None,
        use_rslora=case.has_rslora,
    )  # fmt: skip
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapted.save_pretrained(case.folder(place, "adapter"))


def batch_of(step: int) -> Batch:
    return draw_rows(step, ROWS, VOCAB, is_masked=False).batch()


def flags_of(case: Case, place: Path) -> tuple[str, ...]:
    return (
        "--lora-from", str(case.folder(place, "adapter")), "--data", "synthetic", "--seq-len", str(LENGTH),
        "--global-batch", str(ROWS), "--lr", str(LR), "--eps", "1e-3", "--max-norm", "0.05", "--log-dir",
        str(case.folder(place, "log")), "--no-self-check", *case.flags,
    )  # fmt: skip
