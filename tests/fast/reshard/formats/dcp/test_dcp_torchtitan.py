"""Models that torchtitan's of the same family is not; its own adapters and model code are the oracle."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from manifests.models import model_shape
from tests.builders import Refusal, pack, refusal
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.formats.dcp.test_dcp_source import CONFIGS, huggingface_state, save, torchtitan_state


def pair_halves(folder: Path) -> None:
    """Let RoPE pair the halves of heads; that of torchtitan's DeepSeek-V3, `ComplexRoPE`, pairs adjacent rows."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_interleave": False}))


def test_rope_of_other_rows_than_torchtitans_is_refused(tmp_path: Path) -> None:
    state = huggingface_state("deepseek_v3", tmp_path / "model")
    source = save(tmp_path / "step-7", "deepseek_v3", torchtitan_state("deepseek_v3", state))
    for folder in (tmp_path / "model", source):
        pair_halves(folder)
    repacked = refusal("pack", source, "--layout", "pp=2", "--out", tmp_path / "out")
    for folder, refused in ((tmp_path / "packed", exported(tmp_path)), (source, repacked)):
        assert refused.found == (3, "model.not-in-torchtitan", f"{folder}: config.json: rope_interleave")
    assert not (tmp_path / "out").exists()


def exported(place: Path) -> Refusal:
    """Return how the export of `model`, once it is packed, is refused."""
    packed = pack(place / "model", place / "packed")
    return refusal("export", packed, "--to", "dcp", "--for", "torchtitan", "--out", place / "out")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek_v3"])
def test_biases_that_torchtitans_model_does_not_have_are_refused(kind: str, tmp_path: Path) -> None:
    config = deepcopy(CONFIGS[kind])
    config.attention_bias = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(KeyError, match="bias"):
        torchtitan_state(kind, load_file(tmp_path / "model" / "model.safetensors"))
    exit_code, code, where = exported(tmp_path).found
    assert (exit_code, code, where.rpartition(".")[2]) == (3, "model.not-in-torchtitan", "bias'")


def test_scales_of_float8_weights_are_refused(tmp_path: Path) -> None:
    """Torch would read the weights without them, in another dtype."""
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = read_config("tiny-qwen3", quantization_config=fp8)
    shapes = model_shape(config).tensors
    dtypes = {fqn: torch.float8_e4m3fn if f"{fqn}_scale_inv" in shapes else torch.float32 for fqn in shapes}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    state = {fqn: torch.ones(shapes[fqn], dtype=dtypes[fqn]) for fqn in shapes}
    save_file(state, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    refused = exported(tmp_path)
    assert refused.found[:2] == (3, "model.not-in-torchtitan")
    assert refused.found[2].endswith(".weight_scale_inv'")
