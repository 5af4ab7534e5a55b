"""The examples that dump a training step: what they write is compared with one process, right and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from runner.commands import cli
from tests.builders import pack
from tests.fast.runner.tiny import save_model
from tests.fast.titans import LLAMA
from tests.process.torchrun import launch


def prove(model: Path, dump: Path, code: int) -> dict[str, Any]:
    done = CliRunner().invoke(cli, ["prove", str(model), "--against", str(dump), "--json"])
    assert done.exit_code == code, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def damage(dump: Path, name: str, factor: float) -> Path:
    """Copy a dump, with one of its gradients multiplied."""
    damaged = dump.with_name("damaged")
    shutil.copytree(dump, damaged, dirs_exist_ok=True)
    for file in damaged.glob("gradients*"):
        gradients = load_file(file)
        if name in gradients:
            save_file(gradients | {name: gradients[name] * factor}, file)
    return damaged


def check_both(model: Path, dump: Path, num_tensors: int, name: str) -> None:
    """Check that a dump is equal to one process, and that a damaged one is not."""
    right = prove(model, dump, 0)
    assert (right["equal"], right["num_tensors"], right["differences"]) == (True, num_tensors, [])
    wrong = prove(model, damage(dump, name, 2.0), 4)
    (difference,) = wrong["differences"]
    assert difference["name"] == name
    assert difference["difference"] == pytest.approx(1.0, rel=1e-3)
    assert difference["factor"] == pytest.approx(2.0, rel=1e-3)


def test_a_step_of_plain_fsdp2_is_equal_to_one_process(tmp_path: Path) -> None:
    save_model(tmp_path / "model", tie_word_embeddings=True)
    launch(2, "../../examples/dump_fsdp2.py", tmp_path / "model", tmp_path / "dump")
    check_both(tmp_path / "model", tmp_path / "dump", 74, "model.layers.3.mlp.up_proj.weight")


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"pp": 1, "dp": 2}, {"pp": 2, "dp": 1}], ids=["fsdp", "pp"])
def test_a_step_of_torchtitans_trainer_is_equal_to_one_process(degrees: Mapping[str, int], tmp_path: Path) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed", f"pp={degrees['pp']}")
    job = {"folder": str(tmp_path), "steps": 1, "fused": True, "data": [[5, 0]], "start": str(tmp_path / "packed"),
           "dump": str(tmp_path / "dump"), "out": str(tmp_path / "losses.json"), **degrees}  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    launch(2, "runner/models/titan_worker.py", tmp_path / "job.json")
    check_both(tmp_path / "packed", tmp_path / "dump", 39, "model.layers.2.self_attn.q_proj.weight")
