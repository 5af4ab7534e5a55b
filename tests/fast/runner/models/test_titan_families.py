"""What families of architectures that torchtitan has, too, build, what they call things, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from manifests.errors import InputError
from manifests.models import model_shape
from runner.bundle.packed import open_packed
from runner.checkpoint.state import held_weights
from runner.load.load import load_tensors
from runner.models import family_for
from runner.pipeline.chunk import build_chunks, hf_constants, hf_pieces, materialize
from stores.bundles import Bundles
from tests.builders import Tensor, pack, reshard
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.transforms.test_dequantize import MXFP4, fp8, values_in, write_quantized
from tests.fast.runner.models.decoders import save_decoder
from tests.fast.runner.tiny import CPU, split_evenly

TINY = ("tiny-deepseek-v3", "tiny-gpt-oss", "tiny-llama", "tiny-mistral", "tiny-qwen3", "tiny-qwen3-moe")


def packed_titan(folder: Path, name: str) -> Bundles:
    save_decoder(folder / "source", name)
    pack(folder / "source", folder / "packed", "pp=2", "--quiet")
    launched = open_packed(folder / "packed")
    return Bundles(launched.manifest, launched.root)


@pytest.mark.parametrize("name", TINY)
def test_what_a_bundle_holds_is_loaded_and_held_to_the_last_byte(name: str, tmp_path: Path) -> None:
    bundles, config = packed_titan(tmp_path, name), read_config(name)
    stored = load_file(tmp_path / "source" / "model.safetensors")
    family = family_for(config, max_seq_len=8)
    chunks = build_chunks(family, split_evenly(family.modules, 3), range(3))
    for chunk in chunks:
        materialize(chunk, device=CPU, dtype=torch.float32)
    load_tensors(
        [piece for chunk in chunks for piece in (*hf_pieces(chunk), *hf_constants(chunk))], bundles, model_shape(config)
    )
    held = [piece for kinds in held_weights(chunks, ()).values() for pieces in kinds.values() for piece in pieces]
    assert {piece.fqn for piece in held} == stored.keys()
    assert all(torch.equal(piece.memory, stored[piece.fqn]) for piece in held)


@pytest.mark.parametrize(
    ("name", "changes", "section"), [("tiny-deepseek-v3", {}, fp8(8, 16)), ("tiny-gpt-oss", {"hidden_size": 96}, MXFP4)]
)
def test_quantized_source_is_refused_until_it_is_packed_plain_and_then_has_its_values(
    name: str, changes: dict[str, Any], section: dict[str, Any], tmp_path: Path
) -> None:
    config = read_config(name, **changes)
    stored = write_quantized(tmp_path / "source", {**config, "quantization_config": section})
    for out, flags in (("kept", ()), ("plain", ("--dequantize", "fp32"))):
        asked = ("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / out, "--quiet")
        assert reshard(*asked, *flags).code == 0
    with pytest.raises(InputError) as error:
        open_packed(tmp_path / "kept")
    assert (error.value.code, error.value.where) == (
        "model.quantized", f"{tmp_path}/kept/config.json: quantization_config"
    )  # fmt: skip
    launched = open_packed(tmp_path / "plain")
    family = family_for(launched.config, max_seq_len=8)
    (chunk,) = build_chunks(family, (family.modules,), (0,))
    materialize(chunk, device=CPU, dtype=torch.float32)
    pieces = [*hf_pieces(chunk), *hf_constants(chunk)]
    load_tensors(pieces, Bundles(launched.manifest, launched.root), launched.shape)
    for piece in pieces:
        expected = dequantized(piece.fqn, stored, (8, 16))
        assert torch.equal(piece.memory.nan_to_num(), expected.nan_to_num()), piece.fqn


def dequantized(fqn: str, stored: dict[str, Tensor], block: tuple[int, int]) -> torch.Tensor:
    """Give a tensor's values, by torch alone or by transformers."""
    if f"{fqn}_blocks" in stored:
        blocks, scales = (values_in(stored[f"{fqn}_{part}"]) for part in ("blocks", "scales"))
        return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    values = values_in(stored[fqn]).float()
    if f"{fqn}_scale_inv" in stored:
        scales = values_in(stored[f"{fqn}_scale_inv"]).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        values = values * scales[: values.shape[0], : values.shape[1]]
    return values


DEEPSEEK = """
import json, resource
import runner.models.generic
from runner.pipeline.chunk import build_chunks
from runner.models import family_for
from tests.steps import steps_of
config = json.load(open("tests/data/configs/deepseek-v3.json"))
del config["quantization_config"]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
family = family_for(config, max_seq_len=4096)
share = -(-len(family.modules) // 32)
stages = [family.modules[at : at + share] for at in range(0, len(family.modules), share)]
chunks = build_chunks(family, stages, (1, 17))  # of 16 ranks with 2 stages each
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(steps_of(lambda: build_chunks(family, stages, (1, 17))), sum(1 for c in chunks for _ in c.modules()), grown)
assert sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()) > 20e9
"""


@pytest.mark.slow  # what it has is in the test of true models above
def test_rank_of_deepseek_v3_is_built_in_few_steps_a_module_and_300_mb() -> None:
    done = subprocess.run([sys.executable, "-c", DEEPSEEK], timeout=120, capture_output=True, text=True, check=True)
    num_steps, num_modules, grown_kib = map(int, done.stdout.split())
    assert num_steps < 5000 * num_modules
    assert grown_kib * 1024 < 300e6


@pytest.mark.parametrize("pad", [96, -97, True, "5", 5.0])
def test_padding_token_outside_the_vocabulary_is_refused(pad: object) -> None:
    with pytest.raises(InputError) as error:
        family_for(read_config("tiny-llama", pad_token_id=pad), max_seq_len=8)
    assert (error.value.code, error.value.where) == ("config.refused-by-transformers", "config.json")


def test_numbers_with_which_transformers_divides_by_zero_or_overflows_are_refused() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16,
              "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
    for changes in ({"high_freq_factor": 0}, {"low_freq_factor": 10**30}):
        config = read_config("tiny-llama", rope_parameters={"rope_theta": 1e4, **llama3, **changes})
        with pytest.raises(InputError) as error:
            family_for(config, max_seq_len=8)
        assert (error.value.code, error.value.where) == ("config.refused-by-transformers", "config.json")
