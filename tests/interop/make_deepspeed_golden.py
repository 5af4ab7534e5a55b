"""Write tests/data/golden/deepspeed with DeepSpeed itself: run it with a Python that has DeepSpeed.

Beside each folder that DeepSpeed wrote is a safetensors file: the parameters that its ranks had when they saved, under
transformers' names. `llama-deepspeed` has the layout that llama-deepspeed's convert2ckpt.py writes: torch.save
of transformers' parameters, a file for each layer, whose numbers have two digits for the decoders and the embedding.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden" / "deepspeed"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_layer": 2, "n_head": 2,
    "n_positions": 16, "vocab_size": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "tie_word_embeddings": True,
}  # fmt: skip
MPT = {
    "model_type": "mpt", "architectures": ["MptForCausalLM"], "d_model": 8, "n_layers": 2, "n_heads": 2,
    "expansion_ratio": 4, "max_seq_len": 32, "vocab_size": 16, "tie_word_embeddings": True,
}  # fmt: skip
ODD = {"hidden_size": 6, "num_attention_heads": 3, "head_dim": 2, "vocab_size": 15}  # partitions that are padded
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


def train(place: Path, config: dict[str, Any], **job: Any) -> dict[str, torch.Tensor]:
    """Train two steps with DeepSpeed, save them to `place`, and return the parameters that its ranks have."""
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "config": config, "pp": 2, "dp": 1, "ds_config": {"zero_optimization": {"stage": 1}}, "segments": [[0, 2]],
            "save_at": 2, "save": str(place), "dump": f"{folder}/dump", "out": f"{folder}/losses", **job,
        }  # fmt: skip
        given = {key: value for key, value in given.items() if value is not None}
        Path(folder, "job.json").write_text(json.dumps(given))
        command = [sys.executable, Path(__file__).with_name("deepspeed_worker.py"), f"{folder}/job.json"]
        subprocess.run(command, check=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})
        found: dict[str, torch.Tensor] = {}
        for path in sorted(Path(folder).glob("dump.*"), reverse=True):  # the first rank's copies of what is tied
            found |= load_file(path)
    for name in SCRIPTS:
        (place / name).unlink()
    (place / "config.json").write_text(json.dumps(config, indent=1))
    return found


def transformers_name(name: str, config: dict[str, Any]) -> str:
    """Return what transformers calls a parameter of the worker's PipelineModule."""
    first, _, rest = name.partition(".")
    if config is GPT2:
        layer = {"tied_modules": "transformer", "3": "transformer.ln_f"}.get(first, f"transformer.h.{first}")
        layer = f"transformer.h.{int(first) - 1}" if first in ("1", "2") else layer
        return f"{layer}.{rest.removeprefix('embed.')}"
    if config is MPT:
        layer = {"tied_modules": "wte", "3": "norm_f"}.get(first) or f"blocks.{int(first) - 1}"
        return f"transformer.{layer}.{rest.removeprefix('word_embeddings.')}"
    fixed = {"0": "model.embed_tokens", "3": "model.norm", "4": "lm_head"}
    return f"{fixed[first] if first in fixed else f'model.layers.{int(first) - 1}'}.{rest}"


def write(name: str, config: dict[str, Any], *, is_universal: bool, **job: Any) -> None:
    place = GOLDEN / name
    found = train(place, config, **job)
    save_file({transformers_name(each, config): found[each] for each in found}, GOLDEN / f"{name}.safetensors")
    step = place / "global_step2"
    if is_universal:
        convert(step, place / "global_step2_universal")
        shutil.rmtree(step)
        (place / "latest").unlink()
        (place / "latest_universal").write_text(f"{step.name}_universal")


def convert(step: Path, out: Path, *flags: str) -> None:
    """Let DeepSpeed make a Universal Checkpoint."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", step]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run([*command, "--output_folder", out, *workers, *flags], check=True, timeout=100)


def write_llama_deepspeed(place: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA), dtype=torch.bfloat16)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = place / "global_step001"
    step.mkdir(parents=True)
    (place / "latest").write_text(step.name)
    model.config.save_pretrained(place)
    save_file(state, place.with_suffix(".safetensors"))
    count = model.config.num_hidden_layers
    torch.save({"weight": state["model.embed_tokens.weight"]}, step / "layer_00-model_00-model_states.pt")
    torch.save({"weight": state["model.norm.weight"]}, step / f"layer_{count + 1}-model_00-model_states.pt")
    torch.save({"weight": state["lm_head.weight"]}, step / f"layer_{count + 2}-model_00-model_states.pt")
    for number in range(count):
        prefix = f"model.layers.{number}."
        layer = {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
        torch.save(layer, step / f"layer_{number + 1:02d}-model_00-model_states.pt")
    counts: dict[str, Any] = {"dp_world_size": 1, "mp_world_size": 2, "module": None, "optimizer": None}
    for rank in range(2):
        stub = {**counts, "global_steps": 1, "skipped_steps": 1, "iteration": 1}
        torch.save(stub, step / f"mp_rank_{rank:02d}_model_states.pt")


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    write("llama", LLAMA, is_universal=False)
    write("gpt2", GPT2, is_universal=False, with_model_axis=False)
    write("gpt2-universal", GPT2, is_universal=True)
    write("mpt", MPT, is_universal=False)  # whose head is a layer of its own
    write_llama_deepspeed(GOLDEN / "llama-deepspeed")
