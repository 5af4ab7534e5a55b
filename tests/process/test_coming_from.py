"""Every command of docs/coming-from.md does what the page says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import save
from transformers import AutoModelForCausalLM, LlamaConfig

from reshard import open as open_packed
from reshard import pack
from tests.fast.reshard.formats.dcp.test_dcp_export import Titan
from tests.fast.reshard.formats.deepspeed.test_deepspeed_source import GOLDEN
from tests.fast.titans import LLAMA
from tests.pages import ROOT, SECTIONS_OF, run_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_section(title: str, folder: Path) -> None:
    """Run the blocks below a heading, in order."""
    run_blocks((ROOT / SECTIONS_OF).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0], folder)


def test_commands_for_torchtitan(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    titan = Titan(fused=True, seed=0)
    titan.train(3)
    titan.save(tmp_path / "titan" / "checkpoint" / "step-3")
    before = {name: tensor.clone() for name, tensor in titan.model.state_dict().items()}
    run_section("torchtitan", tmp_path)
    titan.load(tmp_path / "titan-again" / "checkpoint" / "step-6")
    assert titan.counts["step"] == 6
    after = titan.model.state_dict()
    assert all(torch.isfinite(after[name]).all() and not torch.equal(after[name], before[name]) for name in before)


def test_commands_for_deepspeed(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "gpt2-universal", tmp_path / "deepspeed")
    run_section("DeepSpeed", tmp_path)
    universal = tmp_path / "deepspeed-again" / "global_step4_universal" / "zero" / "tied_modules.embed.wte.weight"
    assert torch.load(universal / "step.pt", weights_only=True).item() == 4
    trained = torch.load(universal / "fp32.pt", weights_only=True)["param"]
    layer = tmp_path / "layers" / "global_step4" / "layer_00-model_00-model_states.pt"
    assert torch.equal(torch.load(layer, weights_only=True)["wte.weight"], trained)
    before = load_file(GOLDEN / "gpt2-universal.safetensors")["transformer.wte.weight"]
    assert torch.isfinite(trained).all()
    assert not torch.equal(trained, before)


def test_commands_for_megatron_core(tmp_path: Path) -> None:
    saved = ROOT / "tests" / "data" / "megatron" / "qwen3"
    shutil.copytree(saved, tmp_path / "megatron" / "iter_0000003")
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("3")
    run_section("Megatron-Core", tmp_path)
    pack(str(tmp_path / "megatron-again"), tmp_path / "again", "pp=1")
    trained = open_packed(tmp_path / "history" / "step-000002").stage(0).state_dict()
    again = open_packed(tmp_path / "again").stage(0).state_dict()
    assert trained.keys() <= again.keys()
    assert all((again[name] == tensor).all() for name, tensor in trained.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_commands_for_transformers(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))
    model.save_pretrained(tmp_path / "model")
    # As `accelerate.utils.fsdp_utils.save_fsdp_model` writes it.
    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint-500/pytorch_model_fsdp_0", no_dist=True)
    run_section("transformers and accelerate", tmp_path)
    sharded = open_packed(tmp_path / "fsdp-packed")
    stages = {fqn: weight for stage in sharded.stages for fqn, weight in stage.state_dict(framework="torch").items()}
    assert all(torch.equal(stages[name], tensor) for name, tensor in model.state_dict().items())
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    assert trained.keys() == model.state_dict().keys()
    assert not any(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())
