"""Megatron-Core itself: what it saves computes the same in transformers, and it loads what is exported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import reshard
from tools.interop import HOME

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(900)]

PYTHON = HOME / "megatron" / "bin" / "python"
SCRIPT = Path(__file__).with_name("megatron_core.py")
TOKENS = [[1, 5, 2, 7, 3, 0, 6, 4]]  # of the script
_DENSE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 39, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_DENSE},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_DENSE, "tie_word_embeddings": True},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_DENSE, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}  # fmt: skip

if not PYTHON.exists():
    pytest.skip(f"{PYTHON} is not there: run make interop", allow_module_level=True)


def core(*words: str | Path) -> None:
    """Run megatron-core."""
    ended = subprocess.run([PYTHON, SCRIPT, *words], capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]


def computed(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor(TOKENS)).logits
    return logits


@pytest.mark.parametrize(("name", "tp", "pp"), [("llama", 2, 2), ("llama", 1, 1), ("qwen3", 2, 1), ("qwen3-moe", 1, 2)])
def test_megatron_core_and_transformers_compute_the_same(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    config, saved, ours = tmp_path / "config.json", tmp_path / "saved", tmp_path / "ours"
    config.write_text(json.dumps(MODELS[name]))
    core("save", config, saved, "--tp", str(tp), "--pp", str(pp))
    core("logits", config, saved, tmp_path / "theirs.json")
    theirs = torch.tensor(json.loads((tmp_path / "theirs.json").read_text()))

    (saved / "config.json").write_text(config.read_text())
    reshard.pack(str(saved), tmp_path / "packed", "pp=2")
    reshard.export(tmp_path / "packed", tmp_path / "hf")
    torch.testing.assert_close(computed(tmp_path / "hf"), theirs, rtol=1e-5, atol=1e-5)

    reshard.export(tmp_path / "packed", ours, to="megatron")
    exported = ours / "release"
    core("logits", config, exported, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == theirs.tolist()
    if tp * pp > 1:  # no logits: that its strict loader takes every tensor
        core("logits", config, exported, tmp_path / "none.json", "--tp", str(tp), "--pp", str(pp))
