"""Dequantized sources: values as torch and transformers compute them, and no scales."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from manifests.errors import SourceError
from manifests.models import model_shape
from reshard.copy.journal import plan_key
from reshard.plans.pack_plan import lay_out_shard
from reshard.tensors.lazy import MemoryFile, read_blocks
from reshard.transforms.quantize import plain_tensors, quantize_weight
from stores.bundles import TensorAt
from tests.builders import DTYPE_BITS, INDEX, Tensor, files_in, refusal, reshard, run, tensors_in, write_model
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.formats.test_open import write_description, write_own
from tools.tiny_models import tiny_config

TORCH = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}


def fp8(rows: int, columns: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [rows, columns],
    }  # fmt: skip


def stored_dtype(fqn: str, names: Mapping[str, object]) -> str:
    if fqn.endswith("_scale_inv"):
        return "F32"
    if f"{fqn}_scale_inv" in names:
        return "F8_E4M3"
    return "U8" if fqn.endswith(("_blocks", "_scales")) else "BF16"


def write_quantized(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Write a quantized model of random bytes: float8 NaNs and every scale of mxfp4 are among them."""
    noise, shapes = random.Random(0), model_shape(config).tensors
    tensors = {}
    for fqn, shape in shapes.items():
        dtype = stored_dtype(fqn, shapes)
        data = noise.randbytes(prod(shape) * DTYPE_BITS[dtype] // 8)
        if dtype == "F32":
            data = torch.rand(prod(shape), generator=torch.Generator().manual_seed(len(fqn))).numpy().tobytes()
        tensors[fqn] = Tensor(dtype=dtype, shape=shape, data=data)
    return write_model(folder, config, tensors, num_shards=3)


def values_in(tensor: Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(tensor.data), dtype=TORCH[tensor.dtype]).reshape(tensor.shape)


def expect_same(found: Tensor, expected: torch.Tensor) -> None:
    got = values_in(found)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~expected.isnan()])


def pack(source: Path, out: Path, *args: str) -> Path:
    run("pack", source, "--layout", "pp=2", "--out", out, *args)
    assert reshard("verify", out).code == 0
    return out


@pytest.mark.parametrize(("flag", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("block", [(8, 16), (128, 128), (5, 7)])
def test_float8_weights_are_multiplied_by_the_scales_of_their_blocks(
    block: tuple[int, int], flag: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = read_config("tiny-deepseek-v3", num_nextn_predict_layers=1, intermediate_size=200)
    quantized = {**config, "quantization_config": fp8(*block)}
    stored = write_quantized(tmp_path / "source", quantized)
    out = pack(tmp_path / "source", tmp_path / "out", "--dequantize", flag)
    found = tensors_in(out)
    assert found.keys() == model_shape(config).tensors.keys()
    for fqn, tensor in found.items():
        if f"{fqn}_scale_inv" not in stored:
            assert tensor == stored[fqn]
            continue
        rows, columns = tensor.shape
        scales = values_in(stored[f"{fqn}_scale_inv"])
        scales = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        expect_same(tensor, (values_in(stored[fqn]).float() * scales).to(dtype))
    assert json.loads((out / "config.json").read_text()) == config


@pytest.mark.parametrize(("flag", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_mxfp4_experts_are_those_of_transformers(flag: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = read_config("tiny-gpt-oss", hidden_size=96)
    stored = write_quantized(tmp_path / "source", {**config, "quantization_config": MXFP4})
    found = tensors_in(pack(tmp_path / "source", tmp_path / "out", "--dequantize", flag))
    assert found.keys() == model_shape(config).tensors.keys()
    for fqn, tensor in found.items():
        if fqn in stored:
            assert tensor == stored[fqn]
        else:
            blocks, scales = (values_in(stored[f"{fqn}_{part}"]) for part in ("blocks", "scales"))
            expect_same(tensor, convert_moe_packed_tensors(blocks, scales, dtype=dtype))


@pytest.mark.parametrize(
    ("name", "section"), [("tiny-deepseek-v3", fp8(128, 128)), ("tiny-gpt-oss", MXFP4)], ids=["fp8", "mxfp4"]
)
def test_export_is_the_plain_model_in_the_files_and_the_order_of_the_source(
    name: str, section: dict[str, Any], tmp_path: Path
) -> None:
    config = read_config(name)
    write_quantized(tmp_path / "source", {**config, "quantization_config": section})
    out = pack(tmp_path / "source", tmp_path / "out", "--dequantize", "bf16")
    ended = reshard("export", out, "--to", "hf", "--out", tmp_path / "plain")
    assert ended.out.startswith("exported 7 files, ")
    assert "(headers as in the source)" in ended.out
    before = json.loads((tmp_path / "source" / INDEX).read_text())["weight_map"]
    after = json.loads((tmp_path / "plain" / INDEX).read_text())
    assert after["metadata"]["total_size"] == sum(len(one.data) for one in tensors_in(tmp_path / "plain").values())
    expected = {fqn.removesuffix("_blocks"): shard for fqn, shard in before.items() if "_scale" not in fqn}
    assert after["weight_map"] == expected
    again = pack(tmp_path / "plain", tmp_path / "again")
    assert tensors_in(again) == tensors_in(out)
    assert reshard("diff", out, again).code == 0


def test_manifest_of_quantized_bundles_is_dequantized_as_its_source_is(tmp_path: Path) -> None:
    config = read_config("tiny-deepseek-v3", quantization_config=fp8(8, 16))
    write_quantized(tmp_path / "source", config)
    packed = pack(tmp_path / "source", tmp_path / "packed")
    straight = files_in(pack(tmp_path / "source", tmp_path / "straight", "--dequantize", "bf16"))
    later = files_in(pack(packed, tmp_path / "later", "--dequantize", "bf16"))
    assert {name for name in straight if straight[name] != later[name]} == {"manifest.json"}


@pytest.mark.parametrize(("flag", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_packed_float4_and_scales_of_deepseek_v4_are_those_of_transformers(
    flag: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    kind = transformers.DeepseekV4ForCausalLM
    config = tiny_config(kind, hidden_size=64, moe_intermediate_size=32)
    kind(config).save_pretrained(tmp_path / "plain")  # with the names of DeepSeek's own files
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    noise, expected, found = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in plain.items():
        expected[name] = found[name] = tensor
        is_expert, is_linear = ".experts." in name, name.endswith((".wkv.weight", ".wq_a.weight"))
        if not (tensor.dim() == 2 and (is_expert or is_linear)):
            continue
        rows, columns = tensor.shape
        if is_expert:
            weight = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8, generator=noise)
            grid = (rows, columns // 32)
        else:
            weight = torch.randn(rows, columns, generator=noise).to(torch.float8_e4m3fn)
            grid = (-(-rows // 8), -(-columns // 16))
        scale = torch.randint(0, 256, grid, dtype=torch.uint8, generator=noise).view(torch.float8_e8m0fnu)
        found |= {name: weight, f"{name.removesuffix('weight')}scale": scale}
        expected[name] = Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)
    assert sum(tensor.dtype == torch.int8 for tensor in found.values()) > 3
    source = Path(shutil.copytree(tmp_path / "plain", tmp_path / "source"))
    save_file(found, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": fp8(8, 16)}))
    pack(source, tmp_path / "packed", "--dequantize", flag)
    got = tensors_in(tmp_path / "packed")
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        expect_same(got[name], tensor)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8"])
def test_weight_without_known_scales_is_refused(dtype: str, tmp_path: Path) -> None:
    config = read_config("tiny-deepseek-v3", quantization_config=fp8(8, 16))
    tensors = write_quantized(tmp_path / "source", config)
    shape = tensors["lm_head.weight"].shape
    tensors["lm_head.weight"] = Tensor(dtype=dtype, shape=shape, data=bytes(prod(shape)))
    write_model(tmp_path / "other", config, tensors)
    asked = ("pack", tmp_path / "other", "--layout", "pp=2", "--out", tmp_path / "out")
    exit_code, code, where = reshard(*asked, "--dequantize", "bf16", "--json").refusal
    assert (exit_code, code) == (3, "source.quantized-dtype")
    assert where.endswith("model.safetensors: 'lm_head.weight'")


@pytest.mark.parametrize(
    ("dtype", "of", "shape", "sizes"),
    [
        ("I8", (4, 8), (4, 3), None),
        ("I8", (4, 8), (3, 8), None),
        ("I8", (4, 8), (4, 0), None),
        ("I8", (4, 0), (4, 1), None),
        ("I8", (), (), None),
        ("F8_E4M3", (4, 8), (4, 8), [2, 2]),
        ("F8_E4M3", (4, 8), (4, 8), None),
        ("F8_E4M3", (4, 0), (2, 0), [2, 2]),
        ("U8", (4, 1, 16), (4, 1), None),
        ("U8", (2, 4, 2, 8), (2, 4, 2), None),
        ("U8", (2, 4, 2, 16), (2, 4, 3), None),
        ("U8", (2, 0, 2, 16), (2, 0, 2), None),
    ],
)
def test_scales_that_are_not_of_the_blocks_are_refused(
    dtype: str, of: tuple[int, ...], shape: tuple[int, ...], sizes: Any
) -> None:
    names = ("a_blocks", "a_scales") if dtype == "U8" else ("a.weight", "a.scale")
    stored = {
        name: TensorAt(name, kind, dims, MemoryFile("f", bytes(prod(dims))), 0, prod(dims))
        for name, kind, dims in zip(names, (dtype, "U8" if dtype == "U8" else "F8_E8M0"), (of, shape), strict=True)
    }
    with pytest.raises(SourceError) as found:
        list(plain_tensors(stored, {"weight_block_size": sizes}, "BF16"))
    assert found.value.code == "source.quantized-shape"


def test_mxfp4_blocks_of_4_bit_elements_are_refused() -> None:
    """Of which a shape that fits the config has half of the bytes."""
    stored = {
        "a_blocks": TensorAt("a_blocks", "F4", (1, 2, 2, 16), MemoryFile("f", bytes(32)), 0, 32),
        "a_scales": TensorAt("a_scales", "U8", (1, 2, 2), MemoryFile("f", bytes(4)), 0, 4),
    }
    with pytest.raises(SourceError) as found:
        [list(read_blocks(plain)) for _, plain in plain_tensors(stored, {}, "BF16")]
    assert found.value.code == "source.quantized-dtype"


def test_blocks_that_are_larger_than_the_matrix_take_no_memory() -> None:
    sizes = 10**12, 10**30
    weight = TensorAt("a.weight", "F8_E4M3", (4, 8), MemoryFile("f", bytes([0x38]) * 32), 0, 32)  # of ones
    scale = TensorAt("a.scale", "F8_E8M0", (1, 1), MemoryFile("f", bytes([128])), 0, 1)
    section = {"weight_block_size": list(sizes)}
    ((_, plain),) = plain_tensors({"a.weight": weight, "a.scale": scale}, section, "F32")
    values = b"".join(map(bytes, read_blocks(plain)))
    assert np.frombuffer(values, "<f4").tolist() == [2.0] * 32
    codes, scales = quantize_weight(plain, weight, scale, section)
    assert [b"".join(map(bytes, read_blocks(tensor))) for tensor in (codes, scales)] == [b"\x78" * 32, b"\x78"]


def test_weights_that_another_tool_quantized_are_refused_in_a_described_model_too(tmp_path: Path) -> None:
    """As GPTQ: integers of int32, which a model of another architecture might have as they are."""
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    weights = write_own(tmp_path / "plain")
    name = next(fqn for fqn in weights if fqn.endswith("up_proj.weight"))
    packed = Tensor(dtype="I32", shape=(2, 24), data=bytes(192))
    tensors = {fqn: tensor for fqn, tensor in weights.items() if fqn != name}
    tensors[name.replace("weight", "qweight")] = packed
    write_own(tmp_path / "source", tensors, quantization_config=section)
    described = ("--model", write_description(tmp_path / "model.toml"), "--layout", "pp=2", "--out", tmp_path / "out")
    refused = refusal("pack", tmp_path / "source", *described, "--dequantize", "bf16")
    assert refused.found[:2] == (3, "source.quantized-dtype")
    assert refused.found[2].endswith("config.json: quantization_config")
    run("pack", tmp_path / "source", *described)


def test_scale_of_an_integer_dtype_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    config = read_config("tiny-deepseek-v3", quantization_config=fp8(8, 16))
    tensors = write_quantized(tmp_path / "source", config)
    name = next(fqn for fqn in tensors if fqn.endswith("_scale_inv"))
    scale = tensors[name]
    tensors[name] = Tensor(dtype="I32", shape=scale.shape, data=scale.data)
    write_model(tmp_path / "other", config, tensors)
    asked = ("pack", tmp_path / "other", "--layout", "pp=2", "--out", tmp_path / "out")
    ended = reshard(*asked, "--dequantize", "bf16", "--json")
    exit_code, code, where = ended.refusal
    assert (exit_code, code) == (3, "source.quantized-dtype")
    assert where.endswith(f"model.safetensors: '{name}'.dtype")
    wording(ended.json["error"]["problem"])


@pytest.mark.parametrize(("flag", "name"), [("bf16", "bfloat16"), ("fp32", "float32")])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_names_the_dtype_of_the_dequantized_weights(key: str, flag: str, name: str, tmp_path: Path) -> None:
    config = {**read_config("tiny-deepseek-v3"), key: "bfloat16"}
    write_quantized(tmp_path / "source", {**config, "quantization_config": fp8(128, 128)})
    out = pack(tmp_path / "source", tmp_path / "out", "--dequantize", flag)
    assert reshard("export", out, "--to", "hf", "--out", tmp_path / "plain").code == 0
    for folder in (out, tmp_path / "plain"):
        assert json.loads((folder / "config.json").read_text()) == {**config, key: name}


def test_config_of_the_dequantized_weights_does_not_tie_two(tmp_path: Path) -> None:
    config = {**read_config("tiny-deepseek-v3"), "tie_word_embeddings": True, "quantization_config": fp8(128, 128)}
    write_quantized(tmp_path / "source", config)  # with a head of other values
    out = pack(tmp_path / "source", tmp_path / "out", "--dequantize", "bf16")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_journal_of_a_pack_is_not_that_of_another_size_of_blocks() -> None:
    weight = TensorAt("a.weight", "F8_E4M3", (6, 6), MemoryFile("shard", bytes(36)), 0, 36)
    scale = TensorAt("a.weight_scale_inv", "F32", (2, 2), MemoryFile("scales", bytes(16)), 0, 16)
    keys = [
        plan_key([lay_out_shard("out", [tensor])])
        for size in (4, 5)
        for _, tensor in plain_tensors(
            {one.name: one for one in (weight, scale)}, {"weight_block_size": 2 * [size]}, "BF16"
        )
    ]
    assert len(set(keys)) == 2
