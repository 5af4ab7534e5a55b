"""FLOPs of every family against `torch.utils.flop_counter` on the model that transformers builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from manifests.models import StoredTensors, model_shape
from tests.fast.manifests.models.built import DECODERS, TINY, build, read_config
from tests.fast.manifests.models.catalogued import quiet

BATCH, SEQ_LEN = 2, 48
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in (*TINY, *DECODERS)),
    ("tiny-llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 24}),
    ("tiny-qwen3-moe", {"num_experts_per_tok": 5, "decoder_sparse_step": 2}),
    ("tiny-deepseek-v3", {"q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 2}),
    ("tiny-falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("tiny-falcon", {"multi_query": False, "parallel_attn": False, "alibi": True}),
    ("tiny-opt", {"word_embed_proj_dim": 16}),
    ("tiny-phi", {"num_key_value_heads": 2, "qk_layernorm": True}),
)

# Of the catalogue, by their classes' own sizes; what of a run differs is `make test`'s sample.
FEW = ("GraniteMoeForCausalLM", "Llama4ForCausalLM", "Olmo3ForCausalLM")
NAMED = (
    "Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "CohereForCausalLM", "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM", "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM",
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM", "KimiLinearForCausalLM", "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "SmolLM3ForCausalLM",
)  # fmt: skip


def count(model: PreTrainedModel, *, backward: bool) -> tuple[int, dict[str, int]]:
    """Give the counted FLOPs of the whole model, and of each of its modules."""
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens).logits
        if backward:
            torch.autograd.backward(logits.sum())
    root = type(model).__name__
    by_module = {
        name.removeprefix(f"{root}."): sum(counts.values()) for name, counts in counter.get_flop_counts().items()
    }
    return counter.get_total_flops(), by_module


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_forward_flops_are_those_counted_on_the_model_and_on_each_module(name: str, changes: dict[str, Any]) -> None:
    config = read_config(name, **changes)
    model = build(config)
    model.config._attn_implementation = "eager"  # its products are seen one by one
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    shape = model_shape(config)
    ours = {module: BATCH * SEQ_LEN * work.forward_flops(SEQ_LEN) for module, work in shape.work.items()}
    counted, by_module = count(model, backward=False)
    assert {module: by_module.get(module, 0) for module in shape.modules} == ours
    assert counted == sum(ours.values())
    assert count(model, backward=True)[0] == BATCH * SEQ_LEN * shape.train_flops(SEQ_LEN) == 3 * counted


@pytest.mark.parametrize("architecture", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMED)])
def test_estimated_flops_are_within_a_tenth_of_those_counted_at_true_widths(architecture: str) -> None:
    model_class = getattr(transformers, architecture)
    length, mode = 512, FakeTensorMode(allow_non_fake_inputs=True)
    with quiet(), mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
        config = model_class.config_class(num_hidden_layers=8)
        config._attn_implementation, config._experts_implementation = "eager", "batched_mm"  # products that are counted
        model = model_class(config).eval()
        model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
        files = revert_weight_conversion(model, dict(model.state_dict()))
    stored = StoredTensors(tensors={name: tuple(tensor.shape) for name, tensor in files.items()}, where="SOURCE")
    shape = model_shape({**config.to_dict(), "architectures": [architecture]}, stored=stored)
    assert shape.is_estimated
    estimated = length * sum(work.forward_flops(length) for work in shape.work.values())
    assert estimated == pytest.approx(counter.get_total_flops(), rel=0.1)
