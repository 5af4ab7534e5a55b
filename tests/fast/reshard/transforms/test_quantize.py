"""Quantized weights: codes and scales of published encoders, merges into quantized bases, exports like the source."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from manifests.errors import SourceError
from reshard.copy.journal import plan_key
from reshard.plans.pack_plan import lay_out_shard
from reshard.tensors.lazy import MemoryFile
from reshard.transforms.encoders import quantize_fp8, quantize_mxfp4
from reshard.transforms.quantize import quantize_weight
from stores.bundles import TensorAt
from tests.builders import Tensor, files_in, refusal, run, tensors_in, write_model
from tests.fast.manifests.models.built import read_config
from tests.fast.reshard.transforms.adapters import PREFIX, float32, write_adapter
from tests.fast.reshard.transforms.test_dequantize import MXFP4, fp8, pack, values_in, write_quantized

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE = BF16[BF16.isfinite()]
SORTED = FINITE[FINITE.float().abs().argsort()]


def at(values: torch.Tensor) -> TensorAt:
    data = values.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorAt("a.weight", NAMES[values.dtype], tuple(values.shape), MemoryFile("f", data), 0, len(data))


def codes_and_scales(make: Any) -> tuple[bytes, bytes]:
    codes, scales = (b"".join(map(bytes, make(wants_scales=wanted))) for wanted in (False, True))
    return codes, scales


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def quantize_by_transformers(values: torch.Tensor, sizes: tuple[int, int], scale_fmt: str | None) -> Any:
    """Return codes and scales; blocks that the matrix cuts off are filled with zeros, as transformers takes none."""
    rows, columns = (-(-count // size) * size for count, size in zip(values.shape, sizes, strict=True))
    whole = torch.zeros(rows, columns, dtype=values.dtype)
    whole[: values.shape[0], : values.shape[1]] = values
    config = SimpleNamespace(weight_block_size=sizes, scale_fmt=scale_fmt)
    quantized = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("a.weight", whole)
    return quantized["a.weight"][: values.shape[0], : values.shape[1]], quantized["a.weight_scale_inv"]


def random_blocks() -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=noise)
    powers = 448 * 2.0 ** torch.arange(-30, 31)
    around = torch.cat([powers, powers.nextafter(torch.tensor(1e30)), powers.nextafter(torch.tensor(0.0))])
    return [normal(260, 200), normal(256, 96).bfloat16(), normal(64, 70).half(), torch.zeros(8, 8),
            normal(128, 128) * normal(128, 128).mul(3).exp(), around[:, None].expand(-1, 8)]  # fmt: skip


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_float8_blocks_of_all_bf16_values_are_those_of_transformers(scale_fmt: str | None) -> None:
    large = SORTED[SORTED.float().abs() > 2e-36]  # whose scales are finite
    per_row = large[-(len(large) // 32) * 32 :].reshape(-1, 32)
    for values in (per_row, large[: len(large) // 128 * 128].reshape(128, -1), *random_blocks()):
        for sizes in ((1, 8), (4, 32), (128, 128)):
            codes, scales = quantize_by_transformers(values, sizes, scale_fmt)
            dtype = NAMES.get(scales.dtype, "F8_E8M0")
            made = partial(quantize_fp8, at(values), sizes, dtype, is_power=scale_fmt is not None)
            assert codes_and_scales(made) == (bytes_of(codes), bytes_of(scales))


def nearest_float4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of groups of 32 in the last dimension, by comparing with each of the eight values."""
    groups = values.double().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1)
    exponents = torch.arange(-126, 127)
    fits = largest[..., None] <= 6 * 2.0 ** exponents.double()
    chosen = torch.where(largest > 0, fits.int().argmax(-1) - 126, -127)
    scaled = groups * 2.0 ** -chosen[..., None].double()
    table = torch.tensor([6, 4, 3, 2, 1.5, 1, 0.5, 0], dtype=torch.double)  # of two as near, the larger comes first
    codes = 7 - (scaled.abs()[..., None] - table).abs().argmin(-1)
    codes = torch.where(largest[..., None] > 0, codes, 0) | groups.signbit() * 8
    pairs = codes.unflatten(-1, (16, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), (chosen + 127).to(torch.uint8)


def test_mxfp4_codes_of_all_bf16_values_are_the_nearest_and_scales_the_least_that_fit() -> None:
    noise = torch.Generator().manual_seed(0)
    between = torch.randint(-24, 25, (3, 320, 40), generator=noise) / 4
    for values in (
        SORTED[-(len(SORTED) // 64) * 64 :].reshape(1, -1, 32).transpose(1, 2),
        FINITE[: 32 * 2039].reshape(1, 32, -1),
        torch.randn(3, 96, 40, generator=noise).mul(3).exp().bfloat16(),
        between.bfloat16(),
        torch.randn(2, 64, 24, generator=noise),
    ):
        codes, scales = nearest_float4(values.bfloat16().transpose(1, 2))
        assert codes_and_scales(partial(quantize_mxfp4, at(values))) == (bytes_of(codes), bytes_of(scales))


@pytest.mark.parametrize(
    ("value", "problem"),
    [(float("nan"), "NaN"), (float("inf"), "infinity"), (-float("inf"), "infinity"), (1e-38, "small")],
)
def test_value_that_has_no_code_is_refused(value: float, problem: str) -> None:
    values = torch.zeros(1, 32, 8)
    values[0, 3, 3] = value
    made = [partial(quantize_fp8, at(values[0]), (32, 8), "F32", is_power=False)]
    if abs(value) != 1e-38:
        made.append(partial(quantize_mxfp4, at(values)))
    for make in made:
        with pytest.raises(SourceError) as error:
            codes_and_scales(make)
        assert error.value.code == "source.would-overflow"
        assert problem in error.value.problem


@pytest.mark.parametrize("kinds", [("I8", "F8_E8M0"), ("F8_E4M3", "BF16"), ("F4", "U8")])
def test_scheme_without_an_encoder_is_refused(kinds: tuple[str, str]) -> None:
    weight, scale = (TensorAt(name, kind, (8, 8), MemoryFile("f", bytes(64)), 0, 64)
                     for name, kind in zip(("a.weight", "a.weight_scale_inv"), kinds, strict=True))  # fmt: skip
    with pytest.raises(SourceError) as error:
        quantize_weight(weight, weight, scale, fp8(4, 4))
    assert error.value.code == "source.quantized-dtype"


def test_journal_of_quantized_weights_is_not_that_of_scales_of_another_form() -> None:
    plain = at(torch.ones(8, 8))
    weight, scale = replace(plain, dtype="F8_E4M3"), replace(plain, name="a.weight_scale_inv", shape=(2, 2))
    sections = [fp8(4, 4), fp8(4, 4) | {"scale_fmt": "ue8m0"}, fp8(4, 4) | {"scale_fmt": "ue8m0"}]
    keys = [plan_key([lay_out_shard("out", quantize_weight(plain, weight, scale, section))]) for section in sections]
    assert (len(set(keys)), keys[1]) == (2, keys[2])


def write_float8(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Write a model of float8 blocks without NaN."""
    stored = write_quantized(folder, config)
    for fqn, tensor in stored.items():
        if tensor.dtype == "F8_E4M3":
            data = bytes(byte if byte & 127 != 127 else 0 for byte in tensor.data)
            stored[fqn] = Tensor(dtype=tensor.dtype, shape=tensor.shape, data=data)
        elif tensor.dtype == "BF16":
            values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(fqn))).bfloat16()
            stored[fqn] = Tensor(dtype=tensor.dtype, shape=tensor.shape, data=bytes_of(values))
    return write_model(folder, config, stored, num_shards=3)


def test_merge_into_float8_blocks_is_that_of_transformers_dequantized_and_quantized(tmp_path: Path) -> None:
    config = read_config("tiny-deepseek-v3", quantization_config=fp8(8, 16))
    stored = write_float8(tmp_path / "base", config)
    module = "model.layers.0.self_attn.o_proj"
    rows, columns = stored[f"{module}.weight"].shape
    a, b = float32((2, columns), 1), float32((rows, 2), 2)
    write_adapter(tmp_path / "adapter", {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b},
                  target_modules=["o_proj"])  # fmt: skip
    run("merge", tmp_path / "base", tmp_path / "adapter", "--out", tmp_path / "out")
    merged = tensors_in(tmp_path / "out")
    assert {fqn for fqn in stored if merged[fqn] != stored[fqn]} == {f"{module}.weight", f"{module}.weight_scale_inv"}
    weight, scale = (values_in(stored[f"{module}.weight{end}"]) for end in ("", "_scale_inv"))
    plain = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32).double()
    exact = (plain + 2 * values_in(b).double() @ values_in(a).double()).float()
    codes, scales = quantize_by_transformers(exact, (8, 16), None)
    assert merged[f"{module}.weight"].data == bytes_of(codes)
    assert merged[f"{module}.weight_scale_inv"].data == bytes_of(scales)
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "base" / "config.json").read_bytes()
    run("pack", tmp_path / "base", "--adapter", tmp_path / "adapter", "--layout", "pp=2", "--out", tmp_path / "packed")
    assert tensors_in(tmp_path / "packed") == merged


def test_merge_into_mxfp4_experts_rounds_once_to_bfloat16_and_quantizes(tmp_path: Path) -> None:
    config = read_config("tiny-gpt-oss", hidden_size=96, quantization_config=MXFP4)
    stored = write_quantized(tmp_path / "base", config)
    name = "model.layers.1.mlp.experts.down_proj"
    scales = Tensor(dtype="U8", shape=(shape := stored[f"{name}_scales"].shape), data=bytes([120]) * prod(shape))
    stored[f"{name}_scales"] = scales
    write_model(tmp_path / "base", config, stored, num_shards=3)
    blocks = values_in(stored[f"{name}_blocks"])
    num_experts, outputs, groups, _ = blocks.shape
    a, b = float32((2 * num_experts, groups * 32), 1), float32((outputs, 2 * num_experts), 2)
    module = f"{PREFIX}{name.removesuffix('.down_proj')}"
    write_adapter(tmp_path / "adapter", {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b},
                  target_modules=[], target_parameters=["experts.down_proj"])  # fmt: skip
    run("merge", tmp_path / "base", tmp_path / "adapter", "--out", tmp_path / "out")
    merged = tensors_in(tmp_path / "out")
    assert {fqn for fqn in stored if merged[fqn] != stored[fqn]} == {f"{name}_blocks", f"{name}_scales"}
    plain = convert_moe_packed_tensors(blocks, values_in(scales), dtype=torch.float32).double()
    rows = values_in(a).double().reshape(num_experts, 2, -1)
    columns = values_in(b).double().reshape(outputs, 2, num_experts).permute(2, 0, 1)
    exact = (plain + 2 * (columns @ rows).transpose(1, 2)).bfloat16()
    expected, expected_scales = nearest_float4(exact.transpose(1, 2))
    assert merged[f"{name}_blocks"].data == bytes_of(expected)
    assert merged[f"{name}_scales"].data == bytes_of(expected_scales)


def test_export_like_the_source_has_its_files_headers_and_config_and_quantizes_as_transformers(tmp_path: Path) -> None:
    config = read_config("tiny-deepseek-v3", quantization_config=fp8(8, 16), dtype="bfloat16")
    stored = write_float8(tmp_path / "source", config)
    packed = pack(tmp_path / "source", tmp_path / "packed", "--dequantize", "bf16")
    again = pack(packed, tmp_path / "again")
    ended = run("export", again, "--to", "hf", "--quantize", "like-source", "--out", tmp_path / "out")
    assert "cast" not in ended.out
    before, after = (files_in(tmp_path / name) for name in ("source", "out"))
    assert before.keys() == after.keys()
    assert all(before[name] == after[name] for name in before if name.endswith(".json"))
    found, plain = tensors_in(tmp_path / "out"), tensors_in(packed)
    for fqn, tensor in stored.items():
        assert (found[fqn].dtype, found[fqn].shape) == (tensor.dtype, tensor.shape)
        if tensor.dtype == "F8_E4M3":
            codes, scales = quantize_by_transformers(values_in(plain[fqn]), (8, 16), None)
            assert found[fqn].data == bytes_of(codes)
            assert found[f"{fqn}_scale_inv"].data == bytes_of(scales)
        elif not fqn.endswith("_scale_inv"):
            assert found[fqn] == tensor
    run("export", packed, "--to", "hf", "--out", tmp_path / "plain")
    assert not [path.name for path in (tmp_path / "plain").iterdir() if "quantized" in path.name]


def test_export_of_untrained_mxfp4_experts_has_the_values_of_the_source(tmp_path: Path) -> None:
    config = read_config("tiny-gpt-oss", hidden_size=96, quantization_config=MXFP4)
    stored = write_quantized(tmp_path / "source", config)
    for fqn, tensor in stored.items():
        if fqn.endswith("_scales"):  # whose values are bfloat16 before and after
            stored[fqn] = Tensor(dtype="U8", shape=tensor.shape, data=bytes(9 + byte % 238 for byte in tensor.data))
    write_model(tmp_path / "source", config, stored, num_shards=3)
    packed = pack(tmp_path / "source", tmp_path / "packed", "--dequantize", "bf16")
    run("export", packed, "--to", "hf", "--quantize", "like-source", "--out", tmp_path / "out")
    assert tensors_in(pack(tmp_path / "out", tmp_path / "again", "--dequantize", "bf16")) == tensors_in(packed)


def test_export_of_what_was_not_dequantized_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    packed = pack(tmp_path / "source", tmp_path / "packed")
    asked = ("export", packed, "--quantize", "like-source", "--out", tmp_path / "out")
    assert refusal(*asked, "--to", "hf").found == (2, "options.not-quantized", "--quantize")
    assert refusal(*asked, "--to", "hf", "--dtype", "fp32").found == (2, "options.conflict", "--quantize like-source")
    assert refusal(*asked, "--to", "dcp").found == (2, "options.conflict", "--quantize like-source")
    assert not (tmp_path / "out").exists()
