"""Casts: every value rounded as torch rounds it, streamed, and verified against the digests of what is read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from tests.builders import (
    EMBEDDING,
    INDEX,
    Tensor,
    files_in,
    llama_config,
    pack,
    random_tensors,
    refusal,
    reshard,
    run,
    tensors_in,
    write_model,
)
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.reshard.forged import change_manifest, change_stage
from tests.fast.trained import write_trained

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FLAGS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
UP = "model.layers.1.mlp.up_proj.weight"
# Ties to even, the largest values, subnormals, infinities, NaNs: as bits of an F32.
HARD = (
    0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0xFF7FFFFF, 0x477FE000, 0x477FF000, 0x387FE000,
    0x33000000, 0x33000001, 0x00000001, 0x807FFFFF, 0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000,
    0x7F800001, 0xFFFFFFFF,
)  # fmt: skip


def values_in(tensor: Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(tensor.data), dtype=TORCH[tensor.dtype])


def expect_cast(found: Tensor, before: Tensor, dtype: str) -> None:
    """See that a tensor is torch's cast of another, bit by bit; of a NaN no more than that it is one."""
    assert (found.dtype, found.shape) == (dtype, before.shape)
    expected, got = values_in(before).to(TORCH[dtype]), values_in(found)
    assert torch.equal(expected.isnan(), got.isnan())
    assert torch.equal(expected.nan_to_num(nan=0.0), got.nan_to_num(nan=0.0))
    assert torch.equal(expected.signbit()[~expected.isnan()], got.signbit()[~got.isnan()])


def write_values(folder: Path, dtype: str, after: str) -> dict[str, Tensor]:
    """Write a model whose embedding holds every 16-bit pattern, or hard and random values of a wider dtype.

    Those that are too large for the dtype `after` are 1 instead.
    """
    config = llama_config(vocab_size=4096)
    tensors = random_tensors(config, dtypes=[dtype])
    if dtype in ("F16", "BF16"):
        data = b"".join(bits.to_bytes(2, "little") for bits in range(1 << 16))
    else:
        hard = torch.tensor(HARD, dtype=torch.int64).to(torch.int32).view(torch.float32).to(TORCH[dtype])
        data = hard.view(torch.uint8).numpy().tobytes() + tensors[EMBEDDING].data
    tensors[EMBEDDING] = replace(tensors[EMBEDDING], data=data[: len(tensors[EMBEDDING].data)])
    for fqn, tensor in tensors.items():
        values = values_in(tensor)
        values[~values.isinf() & values.to(TORCH[after]).isinf()] = 1
        tensors[fqn] = replace(tensor, data=values.view(torch.uint8).numpy().tobytes())
    return write_model(folder, config, tensors, num_shards=2)


def export(out: Path, *args: str) -> Path:
    exported = out.parent / "exported"
    run("export", out, "--to", "hf", "--out", exported, *args)
    return exported


@pytest.mark.parametrize("after", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("before", ["F64", "F32", "F16", "BF16"])
def test_values_are_cast_as_torch_casts_them(before: str, after: str, tmp_path: Path) -> None:
    tensors = write_values(tmp_path / "source", before, after)
    pack(tmp_path / "source", tmp_path / "out", "pp=2", "--dtype", FLAGS[after])
    assert reshard("verify", tmp_path / "out").code == 0
    found = tensors_in(tmp_path / "out")
    assert found.keys() == tensors.keys()
    for fqn, tensor in tensors.items():
        expect_cast(found[fqn], tensor, after)


@pytest.mark.parametrize(
    ("before", "after", "fits", "too_large"),
    [
        ("F32", "F16", 65519.0, 65520.0),
        ("BF16", "F16", 65280.0, -65536.0),
        ("F32", "BF16", 3.39e38, 3.4e38),
        ("F64", "F32", 3.4e38, -1e39),
    ],
)
def test_value_that_would_become_infinite_is_refused(
    before: str, after: str, fits: float, too_large: float, tmp_path: Path
) -> None:
    drawn = random_tensors(llama_config())
    tensors = {fqn: replace(tensor, data=bytes(len(tensor.data))) for fqn, tensor in drawn.items()}
    source, out = tmp_path / "source", tmp_path / "out"
    command = ("pack", source, "--layout", "pp=2", "--dtype", FLAGS[after], "--out", out)
    for value, code in ((fits, 0), (float("inf"), 0), (too_large, 3)):
        values = torch.ones(24 * 16, dtype=TORCH[before])
        values[100] = value
        tensors[UP] = replace(tensors[UP], dtype=before, data=values.view(torch.uint8).numpy().tobytes())
        write_model(source, tensors=tensors)
        ended = reshard(*command, "--force", "--json")
        assert ended.code == code, ended.out
    error = ended.json["error"]
    assert (error["code"], error["where"]) == ("source.would-overflow", f"{source}/model.safetensors: '{UP}'")


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_wider_dtype_and_back_gives_every_byte_of_the_source(dtype: str, tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    numbers = {fqn: torch.randn(prod(tensor.shape)).to(TORCH[dtype]) for fqn, tensor in tensors.items()}
    for fqn, values in numbers.items():
        tensors[fqn] = replace(tensors[fqn], dtype=dtype, data=values.view(torch.uint8).numpy().tobytes())
    write_model(tmp_path / "source", llama_config(torch_dtype="float16"), tensors, num_shards=2)
    pack(tmp_path / "source", tmp_path / "out", "pp=2", "--dtype", "fp32")
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "out").values()} == {"F32"}
    assert files_in(export(tmp_path / "out")) == files_in(tmp_path / "source")


def test_trained_weights_are_exported_in_the_dtype_of_the_source_and_untrained_ones_byte_for_byte(
    tmp_path: Path, wording: Callable[[str], None]
) -> None:
    config = llama_config(torch_dtype="bfloat16")
    tensors = random_tensors(config)
    for fqn, tensor in tensors.items():
        values = torch.randn(prod(tensor.shape), dtype=torch.bfloat16)
        tensors[fqn] = replace(tensor, data=values.view(torch.uint8).numpy().tobytes())
    write_model(tmp_path / "source", config, tensors, num_shards=2)
    out = tmp_path / "out"
    pack(tmp_path / "source", out, "pp=2", "--dtype", "fp32")
    step = torch.randn(24 * 16)

    def train(stage: dict[str, Tensor]) -> None:
        stage[UP] = replace(stage[UP], data=(values_in(stage[UP]) + step).view(torch.uint8).numpy().tobytes())

    change_stage(out, 0, train)
    change_manifest(out, lambda document: document.update(training={"step": 1, "num_tokens": 8, "dtype": "F32"}))
    trained = tensors_in(out)[UP]
    ended = reshard("export", out, "--to", "hf", "--out", tmp_path / "exported")
    wording(ended.out.splitlines()[1])
    before, after = files_in(tmp_path / "source"), files_in(tmp_path / "exported")
    changed = {name for name in before if before[name] != after[name]}
    assert after.keys() == before.keys()
    assert changed == {json.loads(before[INDEX])["weight_map"][UP]}
    assert {fqn for fqn, tensor in tensors_in(tmp_path / "exported").items() if tensor != tensors[fqn]} == {UP}
    expect_cast(tensors_in(tmp_path / "exported")[UP], trained, "BF16")


@pytest.mark.parametrize(("flag", "stored", "name"), [("bf16", "BF16", "bfloat16"), ("fp32", "F32", "float32")])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_export_in_one_dtype_says_so_in_index_and_config(
    flag: str, stored: str, name: str, key: str, tmp_path: Path
) -> None:
    parts = {"text_config": {key: "float16", "bos_token_id": 1}, "vision_config": {key: None}}
    config = llama_config(**{key: "float16"}, **parts)
    tensors = write_model(tmp_path / "source", config, random_tensors(config, dtypes=["F16"]), num_shards=2)
    pack(tmp_path / "source", tmp_path / "out")
    ended = reshard("export", tmp_path / "out", "--to", "hf", "--dtype", flag, "--out", tmp_path / "exported", "--json")
    assert ended.json["casts"] == [{"from": "F16", "to": stored, "num_tensors": 39}]
    for fqn, tensor in tensors_in(tmp_path / "exported").items():
        expect_cast(tensor, tensors[fqn], stored)
    exported = files_in(tmp_path / "exported")
    assert json.loads(exported["config.json"]) == {**config, key: name, "text_config": {key: name, "bos_token_id": 1}}
    again = tmp_path / "again"  # nothing is cast
    run("export", pack(tmp_path / "exported", tmp_path / "same"), "--to", "hf", "--dtype", flag, "--out", again)
    assert files_in(again) == exported
    total = sum(len(tensor.data) for tensor in tensors.values()) * (2 if stored == "F32" else 1)
    assert json.loads(exported[INDEX])["metadata"]["total_size"] == total
    assert reshard("plan", tmp_path / "exported", "--layout", "pp=2").code == 0


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_that_config_json_still_says_is_noted(key: str, tmp_path: Path) -> None:
    config = llama_config(**{key: "float16"})
    write_model(tmp_path / "source", config, random_tensors(config, dtypes=["F16"]))
    command = ("pack", tmp_path / "source", "--layout", "pp=2")
    for stored, flag in FLAGS.items():
        ended = reshard(*command, "--out", tmp_path / flag, "--dtype", flag)
        note = f"note: weights are packed in {stored}, and config.json still says float16: "
        assert (ended.code, note in ended.err) == (0, stored != "F16")
    assert "note: " not in reshard(*command, "--out", tmp_path / "as-is").err


def test_transformers_loads_trained_weights_in_the_dtype_of_the_source(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    out = tmp_path / "out"
    pack(tmp_path / "source", out, "pp=2", "--dtype", "fp32")
    for dtype, stored in (("source", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        exported = tmp_path / f"as-{dtype}"
        run("export", out, "--to", "hf", "--dtype", dtype, "--out", exported)
        model, source = (AutoModelForCausalLM.from_pretrained(folder) for folder in (exported, tmp_path / "source"))
        assert {weight.dtype for weight in model.parameters()} == {stored}
        for weight, before in zip(model.parameters(), source.parameters(), strict=True):
            assert torch.equal(weight, before.to(stored))


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("Ernie4_5_MoeForCausalLM", "model.layers.1.mlp.gate.weight"), ("HunYuanMoEV1ForCausalLM", "gate.wg.weight")],
)
def test_parameters_that_transformers_has_in_float32_are_not_rounded(
    tmp_path: Path, architecture: str, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    save_tiny(tmp_path / "source", architecture)
    pack(tmp_path / "source", tmp_path / "out", "pp=2", "--dtype", "bf16")
    run("export", tmp_path / "out", "--to", "hf", "--dtype", "bf16", "--out", tmp_path / "exported")
    source, exported = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.bfloat16).state_dict()
        for folder in ("source", "exported")
    )
    assert {weight.dtype for key, weight in source.items() if key.endswith(name)} == {torch.float32}
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[key], weight) for key, weight in source.items())
    stored = {key: tensor.dtype for key, tensor in tensors_in(tmp_path / "exported").items()}
    assert {dtype for key, dtype in stored.items() if key.endswith(name)} == {"F32"}
    assert "BF16" in stored.values()


def test_weights_with_optimizer_state_are_not_cast_by_pack(tmp_path: Path, wording: Callable[[str], None]) -> None:
    trained = write_trained(tmp_path, "pp=2")
    refused = refusal("pack", trained, "--layout", "pp=4", "--dtype", "bf16", "--out", tmp_path / "out")
    assert refused.found[::2] == (2, "--dtype")
    wording(refused.text)


@pytest.mark.parametrize("args", [["--virtual"], ["--stages", "0"]])
def test_virtual_bundles_are_not_converted(args: list[str], tmp_path: Path, wording: Callable[[str], None]) -> None:
    write_model(tmp_path / "source")
    asked = ("pack", tmp_path / "source", "--layout", "pp=2", "--dtype", "fp32", "--out", tmp_path / "out", *args)
    refused = refusal(*asked)
    assert refused.found == (2, "options.conflict", args[0])
    wording(refused.text)


def test_source_dtype_that_nothing_is_cast_to_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config())
    tensors[UP] = replace(tensors[UP], dtype="F8_E4M3", data=random.Random(0).randbytes(24 * 16))
    write_model(tmp_path / "source", tensors=tensors)
    out = tmp_path / "out"
    pack(tmp_path / "source", out)
    for dtype in ("fp32", "bf16"):
        refused = refusal("export", out, "--to", "hf", "--dtype", dtype, "--out", tmp_path / "exported")
        assert refused.found == (2, "source.cannot-cast", "--dtype")

    def train(stage: dict[str, Tensor]) -> None:
        stage[UP] = replace(stage[UP], dtype="F32", data=bytes(4 * 24 * 16))

    change_stage(out, 0, train)
    refused = refusal("export", out, "--to", "hf", "--out", tmp_path / "exported")
    assert refused.found == (3, "source.cannot-cast", f"{out}/model-00001-of-00002.safetensors: '{UP}'")
