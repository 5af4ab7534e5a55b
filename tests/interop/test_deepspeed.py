"""DeepSpeed itself loads what is exported for it, and what it saves goes on here. `make test-interop` gets it."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.builders import pack, run
from tests.interop.make_deepspeed_golden import GPT2, LLAMA, MPT, transformers_name
from tests.interop.test_readers import part_of_interop
from tests.process.torchrun import launch

ROOT = Path(__file__).parents[2]
MODELS = {"llama": LLAMA, "gpt2": GPT2, "mpt": MPT}
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]


def deepspeed(*args: str | Path) -> None:
    python = part_of_interop("deepspeed") / "bin" / "python"
    subprocess.run([python, *args], check=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})


def train(place: Path, name: str, **job: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run DeepSpeed, by default a PipelineModule over two stages; return its losses and the parameters it ends with."""
    place.mkdir(exist_ok=True)
    given = {
        "config": MODELS[name], "pp": 2, "dp": 1, "ds_config": {"zero_optimization": {"stage": 1}}, "segments": [],
        "dump": str(place / "dump"), "out": str(place / "losses.json"), **job,
    }  # fmt: skip
    given = {key: value for key, value in given.items() if value is not None}
    (place / "job.json").write_text(json.dumps(given))
    deepspeed(Path(__file__).with_name("deepspeed_worker.py"), place / "job.json")
    found: dict[str, torch.Tensor] = {}
    for path in sorted(place.glob("dump.*"), reverse=True):
        found |= load_file(path)
    return json.loads((place / "losses.json").read_text()), found


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("llama", {}),
        ("gpt2", {}),
        # The head's file has names of the last module, and the tied weight alone: DeepSpeed takes it from the first.
        ("gpt2", {"repeats_input": True, "how": "module-not-strict"}),
        ("mpt", {}),
    ],
    ids=["llama", "tied function", "tied input once more", "tied module"],
)
def test_pipeline_module_loads_exported_layers_and_saves_them(name: str, job: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]))
    model.save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed")
    run("export", tmp_path / "packed", "--to", "deepspeed", "--out", tmp_path / "out")
    theirs = {"load": str(tmp_path / "out"), "how": "module", "save": str(tmp_path / "theirs"), "save_at": 0}
    _, loaded = train(tmp_path / "run", name, **theirs | job)
    expected = load_file(tmp_path / "model" / "model.safetensors")
    found = {transformers_name(each, MODELS[name]): loaded[each] for each in loaded}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(MODELS[name]))
    pack(tmp_path / "theirs", tmp_path / "again", "pp=1")
    run("export", tmp_path / "again", "--to", "hf", "--out", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    head = found.pop("lm_head.weight") if MODELS[name]["tie_word_embeddings"] and "lm_head.weight" in found else None
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)
    assert head is None or torch.equal(head, expected["transformer.wte.weight"])


@pytest.mark.parametrize(
    ("name", "degrees", "names"),
    [
        ("llama", {"pp": 2, "dp": 1}, ("--for", "pipeline")),
        ("llama", {"pp": None, "dp": 2}, ()),  # transformers' model, whose optimizer state the ranks share
        ("mpt", {"pp": 2, "dp": 1}, ("--for", "pipeline", "--tied-key", "word_embeddings")),
    ],
    ids=["pipeline", "ZeRO", "tied pipeline"],
)
def test_training_goes_from_deepspeed_to_the_runner_and_back(
    name: str, degrees: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    to_save = {"save_at": 3, "save": str(tmp_path / "theirs")}
    alone, _ = train(tmp_path / "alone", name, segments=[[0, 3], [1, 2], [2, 2]], **to_save, **degrees)
    step = tmp_path / "theirs" / "global_step3"
    convert = ("--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1")
    folders = ("--input_folder", step, "--output_folder", f"{step}_universal")
    deepspeed("-m", "deepspeed.checkpoint.ds_to_universal", *folders, *convert)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(MODELS[name]))
    pack(f"{step}_universal", tmp_path / "packed")
    batch = ("--seq-len", "16", "--global-batch", "4", "--microbatch", "1", "--data", "synthetic", "--seed", "1")
    args = [*batch, "--resume", "auto", "--steps", "5", "--lr", "4e-3", "--checkpoint", str(tmp_path / "history")]
    job = {"root": str(tmp_path / "packed"), "args": [*args, "--log-dir", str(tmp_path / "log")]}
    (tmp_path / "jobs.json").write_text(json.dumps([{**job, "log": str(tmp_path / "runner.log")}]))
    launch(2, "runner/checkpoint/resume_worker.py", tmp_path / "jobs.json")
    lines = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in lines if "loss" in line]
    history, back = tmp_path / "history" / "step-000005", tmp_path / "back"
    run("export", history, "--to", "universal", *names, "--out", back)
    universal = {"zero_optimization": {"stage": 1}, "checkpoint": {"load_universal": True}}
    # A trainer of two parameter groups, of which only one has weight decay, gets the checkpoint's options for both.
    undecayed = ["norm.weight"] if name == "llama" else None
    to_load = {"load": str(back), "how": "universal", "ds_config": universal, "undecayed": undecayed}
    theirs, _ = train(tmp_path / "again", name, segments=[[2, 2]], **to_load, **degrees)
    assert len(ours) == len(theirs) == 2
    for number, (loss, expected) in enumerate(zip([*ours, *theirs], alone[3:], strict=True)):
        assert math.isclose(loss, expected, rel_tol=1e-5), (number, ours, theirs, alone)
