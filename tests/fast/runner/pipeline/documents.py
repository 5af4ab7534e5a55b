"""Packed documents of several architectures, and transformers' loss and gradients of each document by itself."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from manifests.models.catalogue import entry_of
from manifests.placement import Placement
from runner.config.schema import BatchOptions
from runner.data.packing import Sample
from runner.data.sequences import Batch, build_batch
from runner.models.generic import Generic
from runner.pipeline.chunk import StageChunk
from runner.pipeline.schedule import build_schedule
from runner.pipeline.stage_metadata import plan_stage_metadata
from runner.pipeline.timetable import find_timetable
from runner.proof.stages import build_filled, difference
from tests.fast.manifests.models.catalogued import config_of, quiet
from tests.fast.runner.tiny import split_evenly

SEQ_LEN = 16
WINDOW = 3
LENGTHS = ((5, 1, 7, 4), (17,), (2, 15), (11, 6))  # of the documents of each row; the last one has a label more
CUT = BatchOptions(global_batch=len(LENGTHS), microbatch=1, seq_len=SEQ_LEN)
COMMON: Mapping[str, Any] = {
    "hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "intermediate_size": 32, "tie_word_embeddings": False,
    "pad_token_id": 0,
}  # fmt: skip
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
# With the largest relative difference: transformers computes the norms of Gemma and routers in float32.
CONFIGS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "LlamaForCausalLM": ({}, 1e-12),
    "MistralForCausalLM": ({"sliding_window": WINDOW}, 1e-12),
    "Gemma3ForCausalLM": ({**MIXED, "query_pre_attn_scalar": 8}, 1e-6),
    "GptOssForCausalLM": ({**MIXED, **EXPERTS}, 1e-12),
    "AfmoeForCausalLM": (
        {**MIXED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_shared_experts": 1},
        1e-6,
    ),
    "DeepseekV3ForCausalLM": (
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
         "num_key_value_heads": 4, "qk_rope_head_dim": 4, "head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6,
         "num_nextn_predict_layers": 0},
        1e-6,
    ),
}  # fmt: skip


class Alone:
    """A model, and its loss and gradients over documents by themselves, in float64."""

    def __init__(self, architecture: str) -> None:
        changes, self.tolerance = CONFIGS[architecture]
        config = getattr(transformers, architecture).config_class(**{**COMMON, **changes})
        entry = entry_of(architecture)
        assert entry is not None
        self.family = Generic(entry, {**config.to_dict(), "architectures": [architecture]}, max_seq_len=SEQ_LEN)
        self.family._config._experts_implementation = "eager"
        torch.manual_seed(0)
        self.whole = self.family.whole().double().train()
        drawn = torch.Generator().manual_seed(1)
        self.rows = [[torch.randint(3, 64, (length,), generator=drawn) for length in row] for row in LENGTHS]
        count = sum(len(document) - 1 for row in self.rows for document in row)
        losses = [self._loss(document) / count for row in self.rows for document in row if len(document) > 1]
        self.loss = torch.stack(losses).sum()
        self.loss.backward()

    def _loss(self, document: torch.Tensor) -> torch.Tensor:
        logits = self.whole.model(input_ids=document[None, :-1], use_cache=False).logits[0]
        return torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum")

    def packed(self) -> Batch:
        """Return the documents as our own data code packs them."""
        samples = []
        for row in self.rows:
            ends = torch.tensor([len(document) for document in row]).cumsum(0).tolist()
            ids = array("i", torch.cat(row).tolist())
            samples.append(Sample(ids=ids, begins=tuple(ends[:-1]), is_masked=True))
        return build_batch(samples, SEQ_LEN, filler=0)

    def differences(self, schedule: str, placement: Placement, rank: int) -> tuple[float, dict[str, float]]:
        """Train on the packed documents; return what differs of the loss, and of each gradient on this rank."""
        self.family.keep_documents()
        stage_modules = split_evenly(self.family.modules, placement.num_stages)
        everywhere = build_filled(self.family, self.whole, stage_modules)
        for chunk in everywhere if placement.num_ranks == 1 else ():
            chunk.io = None
        chunks = [everywhere[stage] for stage in placement.stages_on(rank)]
        metadata = plan_stage_metadata(self.family, stage_modules, torch.float64)
        timetable = find_timetable(schedule, placement, CUT.num_microbatches)
        loss = build_schedule(timetable, chunks, metadata, CUT).train(self.packed())
        expected = self.loss.item()
        return (0.0 if loss is None else abs(loss.item() - expected) / expected), self.gradients(chunks)

    def gradients(self, chunks: Sequence[StageChunk]) -> dict[str, float]:
        expected = dict(self.whole.named_parameters())
        computed = {name: parameter for chunk in chunks for name, parameter in chunk.body.named_parameters()}
        return {name: difference(grad_of(parameter), grad_of(expected[name])) for name, parameter in computed.items()}


def grad_of(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad


def generic(architecture: str, **changes: Any) -> Generic:
    """Return the family of a tiny config of an architecture."""
    entry = entry_of(architecture)
    assert entry is not None
    with quiet():
        config = {**config_of(architecture).to_dict(), **changes}
        return Generic(entry, {**config, "architectures": [architecture]}, max_seq_len=16)
