"""Merged weights are those of peft's merge_and_unload in float64, rounded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import reshard
from tests.process.runner.training.adapter_cases import EXPERTS, FIELDS, GPT, LLAMA, MIXTRAL, QWEN

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
GPT2 = "GPT2LMHeadModel"
SIZES = {**FIELDS, GPT2: {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}}
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.mark.parametrize(
    ("architecture", "dtype", "fields"),
    [
        (LLAMA, torch.bfloat16, {"use_rslora": True}),
        (LLAMA, torch.float32, {"layers_to_transform": [1], "exclude_modules": ["k_proj"]}),
        (LLAMA, torch.float32, {"target_modules": "all-linear", "exclude_modules": ["gate_proj"]}),
        # peft saves the adapted head beside its adapter
        (QWEN, torch.bfloat16, {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": "orthogonal", "r": 4}),
        (QWEN, torch.bfloat16, {"target_parameters": EXPERTS}),
        (QWEN, torch.float32, {"modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 2}}),
        (MIXTRAL, torch.float32, {"target_parameters": EXPERTS, "alpha_pattern": {"k_proj": 5}}),
        (GPT, torch.float16, {"target_parameters": EXPERTS}),
        (GPT2, torch.float32, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ],
)
def test_merged_weights_are_those_of_peft_rounded_once(
    architecture: str, dtype: torch.dtype, fields: dict[str, Any], tmp_path: Path
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**SIZES[architecture])).to(dtype)
    model.save_pretrained(tmp_path / "base")
    config = LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj"], **fields})
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                weight.normal_(std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    exact = kind.from_pretrained(tmp_path / "base", dtype=torch.float64)
    exact = PeftModel.from_pretrained(exact, tmp_path / "adapter").to(torch.float64).merge_and_unload()
    exact.save_pretrained(tmp_path / "exact")
    done = reshard.merge(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")
    merged, expected, before = (weights_in(tmp_path / name) for name in ("out", "exact", "base"))
    assert merged.keys() == expected.keys() == before.keys()
    assert sum(not torch.equal(merged[fqn], before[fqn]) for fqn in merged) == done.num_merged > 0
    for fqn, weight in merged.items():
        assert weight.dtype == before[fqn].dtype
        bits = weight.view(INTEGERS[weight.dtype])
        apart = (weight.double() - expected[fqn]).abs()
        for step in (1, -1):  # no neighbor is nearer
            assert (
                apart <= ((bits + step).view(weight.dtype).double() - expected[fqn]).abs().nan_to_num(np.inf)
            ).all(), fqn


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {fqn: weight for path in folder.glob("*.safetensors") for fqn, weight in load_file(path).items()}
