"""Megatron-Core itself: what it saves computes the same in transformers, and it loads what is exported.

Releases from 0.19 on save the arguments in another place.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import reshard
from manifests.errors import UserError
from runner.config.schema import BatchOptions, DataOptions
from runner.data.sequences import read_batches
from tests.fast.reshard.formats.megatron.test_megatron import tensors_of
from tests.interop.test_readers import part_of_interop
from tests.process.torchrun import launch
from tools.interop import HOME

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(900)]

PYTHON = HOME / "megatron" / "bin" / "python"
SCRIPT = Path(__file__).with_name("megatron_core.py")
TOKENS = [[1, 5, 2, 7, 3, 0, 6, 4]]  # of the script
OLDEST, NEWEST = "0.16", "0.19"
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
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_DENSE, "num_hidden_layers": 4,
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "rope_scaling": {
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 0.8,
        },
    },
}  # fmt: skip

if not PYTHON.exists():
    pytest.skip(f"{PYTHON} is not there: run make interop", allow_module_level=True)


def core(*words: str | Path, release: str) -> None:
    """Run a release of megatron-core: that of the environment, or the files of a newer one."""
    env = dict(os.environ)
    if release != OLDEST:
        env["PYTHONPATH"] = str(part_of_interop(f"megatron-{release}"))
    ended = subprocess.run([PYTHON, SCRIPT, *words], capture_output=True, text=True, timeout=400, check=False, env=env)
    assert ended.returncode == 0, ended.stderr[-2000:]


def computed(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor(TOKENS)).logits
    return logits


def assert_holds(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], vocab: int) -> None:
    """Check keys, shapes and values, but for the rows that pad the vocabulary."""
    for name, tensor in expected.items():
        rows = vocab if name.startswith(("embedding.", "output_layer.")) else len(tensor)
        assert torch.equal(found[name], tensor[:rows]), name


@pytest.mark.parametrize(
    ("name", "tp", "pp", "release"),
    [
        ("llama", 2, 2, OLDEST),
        ("llama", 1, 1, OLDEST),
        ("qwen3", 2, 1, OLDEST),
        ("qwen3-moe", 1, 2, OLDEST),
        ("deepseek-v3", 1, 1, OLDEST),
        ("deepseek-v3", 2, 2, OLDEST),
        ("llama", 2, 2, NEWEST),
        ("qwen3-moe", 1, 1, NEWEST),
        ("deepseek-v3", 2, 2, NEWEST),
    ],
)
def test_megatron_core_and_transformers_compute_the_same(
    tmp_path: Path, name: str, tp: int, pp: int, release: str
) -> None:
    config, saved, ours = tmp_path / "config.json", tmp_path / "saved", tmp_path / "ours"
    config.write_text(json.dumps(MODELS[name]))
    core("save", config, saved, "--tp", str(tp), "--pp", str(pp), release=release)
    assert (saved / "common.pt").exists() == (release == OLDEST)
    core("logits", config, saved, tmp_path / "theirs.json", release=release)
    theirs = torch.tensor(json.loads((tmp_path / "theirs.json").read_text()))

    (saved / "config.json").write_text(config.read_text())
    reshard.pack(str(saved), tmp_path / "packed", "pp=2")
    reshard.export(tmp_path / "packed", tmp_path / "hf")
    torch.testing.assert_close(computed(tmp_path / "hf"), theirs, rtol=1e-5, atol=1e-5)

    reshard.export(tmp_path / "packed", ours, to="megatron")
    exported = ours / "release"
    assert_holds(tensors_of(exported), tensors_of(saved), vocab=MODELS[name]["vocab_size"])
    core("logits", config, exported, tmp_path / "again.json", release=release)
    assert json.loads((tmp_path / "again.json").read_text()) == theirs.tolist()
    if tp * pp > 1:  # no logits: that its strict loader takes every tensor
        core("logits", config, exported, tmp_path / "none.json", "--tp", str(tp), "--pp", str(pp), release=release)


def trained(place: Path, name: str, *words: str | Path, segments: list[tuple[int, int]] | None = None) -> list[float]:
    """Let megatron-core train a model on the runner's data: of each seed, so many batches. Return the losses."""
    place.mkdir()
    model = {**MODELS[name], "vocab_size": 40}  # without padding, which counts in Megatron's loss
    (place / "config.json").write_text(json.dumps(model))
    if segments is not None:
        batch = BatchOptions(seq_len=16, global_batch=4, microbatch=1)
        data = []
        for seed, count in segments:
            source = DataOptions(sources=("synthetic",), seed=seed)
            read = read_batches(source, batch, folder=Path(), vocab_size=40)
            data += [[one.tokens.tolist(), one.labels.tolist()] for one in islice(read, count)]
        (place / "data.json").write_text(json.dumps(data))
        words = (*words, "--data", place / "data.json")
    core("train", place / "config.json", place / "saved", place / "losses.json", *words, release=OLDEST)
    losses: list[float] = json.loads((place / "losses.json").read_text())
    return losses


def packed_of(saved: Path, out: Path) -> dict[str, torch.Tensor]:
    """Pack a checkpoint, and return its weights and optimizer state."""
    reshard.pack(str(saved), out, "pp=2")
    files = sorted(out.rglob("*.safetensors"))
    return {f"{path.relative_to(out).parent} {fqn}": one for path in files for fqn, one in load_file(path).items()}


def resumed(place: Path, args: list[str]) -> list[float]:
    """Train the packed model of a folder on two ranks, and return the losses."""
    job = {"root": str(place / "packed"), "args": [*args, "--log-dir", str(place / "log")]}
    (place / "jobs.json").write_text(json.dumps([{**job, "log": str(place / "runner.log")}]))
    launch(2, "runner/checkpoint/resume_worker.py", place / "jobs.json")
    lines = [json.loads(line) for line in (place / "log" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_training_goes_from_megatron_core_to_the_runner_and_back(tmp_path: Path, name: str) -> None:
    alone = trained(tmp_path / "alone", name, "--save-at", "2", segments=[(0, 2), (1, 2), (2, 2)])
    reshard.pack(str(tmp_path / "alone" / "saved"), tmp_path / "packed", "pp=2")
    batch = ("--seq-len", "16", "--global-batch", "4", "--microbatch", "1", "--data", "synthetic", "--seed", "1")
    ours = resumed(tmp_path, [*batch, "--resume", "auto", "--steps", "4", "--checkpoint", str(tmp_path / "history")])
    reshard.export(tmp_path / "history" / "step-000004", tmp_path / "back", to="megatron")
    exported = tmp_path / "back" / "iter_0000004"
    theirs = trained(tmp_path / "again", name, "--load", exported, segments=[(2, 2)])
    assert len(ours) == len(theirs) == 2
    for number, (loss, expected) in enumerate(zip([*ours, *theirs], alone[2:], strict=True)):
        assert math.isclose(loss, expected, rel_tol=1e-5), (number, ours, theirs, alone)


def test_mtp_layers_train_as_those_of_megatron_core(tmp_path: Path) -> None:
    """Megatron-Core divides the loss of an MTP layer by its own labels: of 16 in a row, 15. Both give it weight 1."""
    epsilon = ("--eps", "0.01")  # a step does not magnify what rounding leaves of a small gradient
    trained(tmp_path / "begun", "deepseek-v3", "--save-at", "2", *epsilon, segments=[(0, 2)])
    alone = trained(tmp_path / "alone", "deepseek-v3", "--save-at", "4", *epsilon, segments=[(0, 2), (1, 2)])
    reshard.pack(str(tmp_path / "begun" / "saved"), tmp_path / "packed", "Ettt|tmL")
    batch = ("--seq-len", "16", "--global-batch", "4", "--microbatch", "1", "--data", "synthetic", "--seed", "1")
    args = [
        *batch, "--mtp-loss-weight", str(16 / 15), *epsilon, "--no-self-check",
        "--resume", "auto", "--steps", "4", "--checkpoint", str(tmp_path / "history"),
    ]  # fmt: skip
    ours = resumed(tmp_path, args)
    assert ours == pytest.approx(alone[2:], rel=1e-6)
    theirs = packed_of(tmp_path / "alone" / "saved", tmp_path / "theirs")
    step = tmp_path / "history" / "step-000004"
    weights = {f". {fqn}": weight for file in step.glob("*.safetensors") for fqn, weight in load_file(file).items()}
    assert weights.keys() == {name for name in theirs if name.startswith(". ")}
    assert ". model.layers.4.eh_proj.weight" in weights
    for name, weight in weights.items():
        assert (weight - theirs[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize(("name", "tp", "pp", "dp"), [("llama", 2, 1, 2), ("qwen3", 1, 2, 1)])
def test_optimizer_state_of_any_degrees_comes_and_goes(tmp_path: Path, name: str, tp: int, pp: int, dp: int) -> None:
    degrees = ("--tp", str(tp), "--pp", str(pp), "--dp", str(dp))
    trained(tmp_path / "run", name, *degrees)
    first = packed_of(tmp_path / "run" / "saved", tmp_path / "packed")
    reshard.export(tmp_path / "packed", tmp_path / "ours", to="megatron")
    exported = tmp_path / "ours" / "iter_0000001"
    for key, tensor in packed_of(exported, tmp_path / "second").items():
        assert torch.equal(tensor, first.pop(key)), key
    assert not first
    trained(tmp_path / "alone", name, "--load", exported)  # its strict loader takes every tensor, and it goes on
    trained(tmp_path / "again", name, *degrees, "--load", exported)


def test_state_of_the_ranks_that_saved_it_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "run", "llama", "--sharding", "dp_reshardable")
    with pytest.raises(UserError) as raised:
        reshard.pack(str(tmp_path / "run" / "saved"), tmp_path / "packed", "pp=1")
    assert raised.value.code == "source.megatron-dp-reshardable"
    reshard.pack(str(tmp_path / "run" / "saved"), tmp_path / "packed", "pp=1", drop=["optimizer"])
